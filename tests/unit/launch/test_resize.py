"""A resize request is a number in a file; any other content does not end a run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

import fabricx as fx
from fabricx.cli.main import _scale
from fabricx.launch.resize import ELASTIC, MAX_WORKERS, Requests, request_workers
from fabricx.launch.run_lock import exclusive_run
from fabricx.testing import QUIET, TinyModule, tiny_loader

GARBAGE = (
    b"\xff\xfe\x00", b" ", b"-3", b"0", b"3.0", b"1e3", b"three", b"3\n4", b"9" * 100_000,
    str(MAX_WORKERS + 1).encode(), "\u0663".encode(), b"3\x00",
)  # fmt: skip


def test_a_requested_number_is_used_once(tmp_path: Path) -> None:
    with exclusive_run(tmp_path, ELASTIC):
        request_workers(tmp_path, 2)
        request_workers(tmp_path, 3)
    requests = Requests(tmp_path)
    assert [requests.take(), requests.take()] == [3, None]
    (tmp_path / "workers").write_text(" 2\n")
    assert requests.take() == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_an_invalid_request_prints_a_line_and_a_later_request_is_accepted(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = Requests(tmp_path)
    (tmp_path / "workers").write_bytes(content)
    assert [requests.take(), requests.take()] == [None, None]
    assert capsys.readouterr().err.count("ignored a request") == 1
    (tmp_path / "workers").write_text("2")
    assert requests.take() == 2


def test_a_path_that_is_not_a_file_is_not_opened_and_prints_a_single_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "workers"
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/hostname")):
        make()
        requests = Requests(tmp_path)
        assert [requests.take(), requests.take()] == [None, None]
        assert capsys.readouterr().err.count("it is not a regular file") == 1
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_file_that_cannot_be_removed_prints_a_single_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "workers").write_text("2")
    monkeypatch.setattr(os, "rename", refuse)
    requests = Requests(tmp_path)
    assert [requests.take(), requests.take()] == [None, None]
    assert capsys.readouterr().err.count("Permission denied") == 1


def test_an_incomplete_file_is_read_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, requests = tmp_path / "workers", Requests(tmp_path)
    path.touch()
    assert requests.take() is None
    path.write_text("3")
    assert requests.take() == 3
    path.touch()
    os.utime(path, (time.time() - 60, time.time() - 60))
    assert requests.take() is None
    assert capsys.readouterr().err.count("ignored a request") == 1


def test_the_command_refuses_invalid_numbers_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with exclusive_run(tmp_path, ELASTIC):
        for number in ("0", str(MAX_WORKERS + 1), "-1", "x", "", "1.5", "\u0663"):
            assert _scale([str(tmp_path), number]) == 1
        with pytest.raises(ValueError, match=f"1 to {MAX_WORKERS}"):
            request_workers(tmp_path, 10**9)
        (tmp_path / "workers").mkdir()
        with pytest.raises(ValueError, match="could not write the request"):
            request_workers(tmp_path, 2)
    assert "1 to" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"workers"}


def test_a_run_ignores_a_request_that_an_earlier_run_has_not_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[bool] = []

    def begin(*arguments: object, **options: object) -> None:
        begun.append((tmp_path / "workers").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr("fabricx.launch.supervisor.run_workers", begin)
    (tmp_path / "workers").write_text("3")
    trainer = fx.Trainer(devices=2, max_epochs=1, **{**QUIET, "enable_checkpointing": True})
    trainer.run_dir = tmp_path
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit(TinyModule(), tiny_loader())
    assert begun == [False]
    assert "ignored an earlier request for 3 workers" in capsys.readouterr().err
