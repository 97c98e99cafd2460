"""Temporary folders are private, and do not outlive their process."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import socket
import stat
import tempfile
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from fabricx import scratch
from fabricx.scratch import (
    LOCK,
    multiprocessing_folder_of,
    private_folder,
    remove_if_abandoned,
    sweep,
    unlink_semaphores_of,
)


def abandoned(parent: Path, host: str) -> Path:
    """Create the folder of a killed process of a host."""
    folder = Path(tempfile.mkdtemp(prefix="fabricx-", dir=parent))
    (folder / LOCK).write_text(host)
    (folder / "job").write_text("secret")
    return folder


def test_a_folder_is_private_and_deleted_at_the_end(tmp_path: Path) -> None:
    with private_folder(tmp_path) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert not remove_if_abandoned(folder)
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = abandoned(tmp_path, socket.gethostname())
    elsewhere = abandoned(tmp_path, "another-machine")
    unlocked = Path(tempfile.mkdtemp(prefix="fabricx-", dir=tmp_path))
    (tmp_path / "fabricx-link").symlink_to(elsewhere)
    (tmp_path / "mine").mkdir()
    with private_folder(tmp_path) as alive:
        assert not dead.exists()
        sweep(str(tmp_path))
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {elsewhere.name, unlocked.name, "fabricx-link", "mine", os.path.basename(alive)}


def test_a_forked_child_that_drops_the_context_does_not_delete_the_folder(tmp_path: Path) -> None:
    context = private_folder(tmp_path)
    folder = context.__enter__()
    child = os.fork()
    if not child:
        del context
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.isdir(folder)
    context.__exit__(None, None, None)
    assert not os.path.exists(folder)


def test_an_error_names_the_folder_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(OSError, match="nowhere: No such file or directory; set TMPDIR to"),
        private_folder(tmp_path / "nowhere"),
    ):
        pass

    def full(**options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space left on device; set TMPDIR to"), private_folder(tmp_path):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(os, "write", lambda *arguments: full())
    with pytest.raises(OSError, match="No space left on device; set TMPDIR to"), private_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_paths_of_multiprocessing_sockets_are_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    process = multiprocessing.process.BaseProcess.__new__(multiprocessing.process.BaseProcess)
    process._config = {"tempdir": "short"}  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    parent = scratch._short()
    assert parent is not None
    assert len(parent) + scratch._LONGEST_NAME <= 107
    multiprocessing_folder_of(process, str(long / "fabricx-12345678"), 0)
    assert process._config["tempdir"] == "short"  # type: ignore[attr-defined]
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert scratch._short() is None
    with private_folder("/tmp") as folder:
        multiprocessing_folder_of(process, folder, 0)
        assert process._config["tempdir"] == f"{folder}/mp"  # type: ignore[attr-defined]


def test_only_semaphores_of_the_run_are_removed_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(scratch, "SEMAPHORES", str(shm))
    unregistered: list[str] = []
    monkeypatch.setattr(resource_tracker, "unregister", lambda name, kind: unregistered.append(name))
    dead = abandoned(tmp_path, socket.gethostname()).name
    elsewhere = abandoned(tmp_path, "another-machine").name
    kept = {f"sem.mp-{elsewhere}-0-a", "sem.mp-a", f"mp-{dead}-0-a", "torch_1"}
    for name in (*kept, f"sem.mp-{dead}-0-a", f"sem.mp-{dead}-11-b"):
        (shm / name).touch()
    with private_folder(tmp_path) as folder:
        assert {file.name for file in shm.iterdir()} == kept  # semaphores of dead processes are removed
        assert unregistered == []
        first, second = (multiprocessing.process.BaseProcess.__new__(multiprocessing.process.BaseProcess) for _ in "ab")
        for rank, process in enumerate((first, second), start=1):
            process._config = {}  # type: ignore[attr-defined]
            multiprocessing_folder_of(process, folder, rank)
            (shm / f"sem.{process._config['semprefix'][1:]}-a").touch()  # type: ignore[attr-defined]
        (shm / f"sem.mp-{os.path.basename(folder)}-12-a").touch()
        unlink_semaphores_of(first)
        assert unregistered == [f"/mp-{os.path.basename(folder)}-1-a"]
        assert len({file.name for file in shm.iterdir()} - kept) == 2
    assert {file.name for file in shm.iterdir()} == kept


def test_a_world_writable_parent_folder_without_sticky_bit_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"chmod \+t"), private_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o1777)
    with private_folder(tmp_path) as folder:
        assert os.path.isdir(folder)
