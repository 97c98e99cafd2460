"""A folder has at most a single run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from fabricx.launch.run_lock import DETACHED, exclusive_run, lock_owner


def test_a_second_run_in_a_folder_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with exclusive_run(folder, "socket of the run"):
        assert lock_owner(folder) == f"{os.getpid()} socket of the run"
        with pytest.raises(ValueError, match=f"process {os.getpid()} is training in .*one: wait until it ends"):
            exclusive_run(folder).__enter__()
        with exclusive_run(tmp_path / "runs" / "two"):
            pass
    assert lock_owner(folder) is None
    assert not (folder / "running").exists()
    with exclusive_run(folder):
        assert lock_owner(folder) == str(os.getpid())  # without the label of the first
    with exclusive_run(folder, f"{DETACHED}run;1"), pytest.raises(ValueError, match=r"one continues.* run1$"):
        exclusive_run(folder).__enter__()


def test_the_lock_file_of_a_killed_run_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / "running").write_text("1234 killed")
    assert lock_owner(tmp_path) is None
    with exclusive_run(tmp_path):
        pass


def test_a_run_that_opens_the_file_as_another_run_deletes_it_is_the_only_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    flock, first = fcntl.flock, ExitStack()
    first.enter_context(exclusive_run(tmp_path))

    def first_ends(*arguments: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.close()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", first_ends)
    with exclusive_run(tmp_path), pytest.raises(ValueError, match="is training in"):
        exclusive_run(tmp_path).__enter__()


def test_reading_the_owner_creates_and_changes_no_file(tmp_path: Path) -> None:
    assert lock_owner(tmp_path / "none") is None
    with exclusive_run(tmp_path), (tmp_path / "running").open() as file:
        assert lock_owner(tmp_path) == file.read()
    (tmp_path / "running").write_text("1234 killed")
    assert lock_owner(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["running"]


def test_a_run_can_start_while_another_process_reads_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "running").touch()
    asking = (tmp_path / "running").open()
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: asking.close())
    with exclusive_run(tmp_path):
        assert lock_owner(tmp_path) == str(os.getpid())


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive_run(tmp_path):
        assert (tmp_path / "running").read_text() == str(os.getpid())
        assert lock_owner(tmp_path) is None
    assert "a file system without locks" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
