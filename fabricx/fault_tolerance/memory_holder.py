"""A process that keeps memory files open under torchrun until torchrun ends.

torchrun ends all its processes when a process dies, and restarts them. The holder process keeps the memory files of
their copies open, so that the new processes can read them. Nothing is written to disk; the files vanish with the
holder, for any cause of its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 20.0  # longest start of Python
_STARTED: list[subprocess.Popen[bytes]] = []  # references, because Python warns about child processes without them


def folder_of(number: int, parent: int | None = None) -> Path:
    """Return the folder of a run, equal for all ranks of a launch on this machine.

    Args:
        number: index of the run in the script.
        parent: process that has started the ranks, such as torchrun; None: the parent of this process.
    """
    # Machines may share a folder for temporary files.
    where = f"{socket.gethostname()}-{os.getuid()}-{parent or os.getppid()}"
    return Path(tempfile.gettempdir()) / f"fabricx-{where}-{number}"


def start(folder: Path, names: list[str]) -> bool:
    """Start a holder process, if there is none; it ends when this process's parent (torchrun) ends.

    Args:
        folder: folder for the links to the files.
        names: names of the files.

    Returns:
        whether a holder process is running.
    """
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):  # not Linux
        return False
    if is_kept(folder, names):
        return True
    if _is_own(folder) and any((folder / name).exists() for name in ("alive.new", "alive", "holder")):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier holder, which was killed
    command = [sys.executable, "-I", __file__, str(os.getppid()), str(folder), *names]
    quiet = subprocess.DEVNULL
    # A new session, because torchrun ends the process groups of its processes.
    _STARTED.append(subprocess.Popen(command, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))
    deadline = time.monotonic() + START_S
    while not is_kept(folder, names):
        if _STARTED[-1].poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_kept(folder: Path, names: list[str]) -> bool:
    """Return whether a holder process of this user has these files open, in a folder that only this user can write to.

    Args:
        folder: folder of the links to the files.
        names: names of the files.
    """
    with contextlib.suppress(OSError):
        if not _is_own(folder):
            return False
        kept = [os.readlink(os.readlink(folder / name)).startswith("/memfd:fabricx") for name in names]
        return (folder / "holder").exists() and all(kept)
    return False


def _is_own(folder: Path) -> bool:
    """Return whether only this user owns and can write to a folder, because its name is predictable."""
    from fabricx.distributed.messages.authentication import (
        check_private,  # local import: the holder runs without fabricx
    )

    with contextlib.suppress(OSError):
        check_private(folder)
        return True
    return False


def _lives(folder: Path) -> bool:
    """Return whether the holder process has not ended; the number of a process that was killed may be another's."""
    import fcntl

    with (folder / "alive").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def end(folder: Path) -> None:
    """End the holder process, which frees the memory; ignores a folder of another user.

    Args:
        folder: folder of the links to the files.
    """
    with contextlib.suppress(OSError, ValueError):
        if _is_own(folder) and _lives(folder):
            os.kill(int((folder / "holder").read_text()), signal.SIGTERM)
    for process in _STARTED:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(START_S)
    _STARTED.clear()


def _keep(parent: int, folder: Path, names: list[str]) -> None:
    """Keep the files open until the process `parent` ends or this process receives SIGTERM."""
    import fcntl  # local import: some systems that import this module do not have it

    watched = os.pidfd_open(parent)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    folder.mkdir(mode=0o700)  # fails for an existing folder, because its name is predictable
    # As in fabricx.scratch: a later run removes the folder if this lock is free.
    lock = os.open(folder / "alive.new", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(lock, socket.gethostname().encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "alive.new", folder / "alive")
    try:
        for name in names:
            (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{os.memfd_create('fabricx')}")
        passing = folder / "holder.new"
        passing.write_text(str(os.getpid()))
        passing.rename(folder / "holder")
        ended = select.poll()
        ended.register(watched, select.POLLIN)
        ended.poll()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
