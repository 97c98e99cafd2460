"""A process that keeps memory files open under torchrun until torchrun ends.

torchrun ends all its processes when one dies, and starts them again. What they have copied to the files here is there
then: the keeper only has them open. They are on no disk, and are gone with it, whatever ends it.
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

START_S = 20.0  # for Python to start
_STARTED: list[subprocess.Popen[bytes]] = []  # else Python complains that nobody waits for them


def folder_of(number: int) -> Path:
    """Return the folder of a run: the same for all processes that one torchrun starts on this machine.

    Args:
        number: which run of the script it is.
    """
    where = f"{socket.gethostname()}-{os.getuid()}-{os.getppid()}"  # machines may share a folder for temporary files
    return Path(tempfile.gettempdir()) / f"fabricx-{where}-{number}"


def start(folder: Path, names: list[str]) -> bool:
    """Let a process keep files of these names open in a folder, if none does; returns whether one does.

    It ends when this process's parent does.
    """
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):  # another system than Linux
        return False
    if is_kept(folder, names):
        return True
    if _is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-I", __file__, str(os.getppid()), str(folder), *names]
    quiet = subprocess.DEVNULL
    # In a session of its own: torchrun ends the groups of its processes.
    _STARTED.append(subprocess.Popen(command, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))
    deadline = time.monotonic() + START_S
    while not is_kept(folder, names):
        if _STARTED[-1].poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_kept(folder: Path, names: list[str]) -> bool:
    """Return whether a keeper of this user's has these files, in a folder that no other user can have made."""
    with contextlib.suppress(OSError):
        if not _is_own(folder):
            return False
        kept = [os.readlink(os.readlink(folder / name)).startswith("/memfd:fabricx") for name in names]
        return (folder / "keeper").exists() and all(kept)
    return False


def _is_own(folder: Path) -> bool:
    """Return whether no other user can have made a folder, whose name can be guessed, or can write to it."""
    from fabricx.distributed.authentication import check_private  # here, since the keeper itself runs without fabricx

    with contextlib.suppress(OSError):
        check_private(folder)
        return True
    return False


def end(folder: Path) -> None:
    """Give the memory back; a folder of another user's names no process to be ended."""
    with contextlib.suppress(OSError, ValueError):
        if _is_own(folder):
            os.kill(int((folder / "keeper").read_text()), signal.SIGTERM)
    for one in _STARTED:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(START_S)
    _STARTED.clear()


def _keep(parent: int, folder: Path, names: list[str]) -> None:
    """Have the files open until a process ends, or this one is told to."""
    import fcntl  # here: not every system that imports this module has it

    watched = os.pidfd_open(parent)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    folder.mkdir(mode=0o700)  # never one that is there: its name can be guessed
    lock = os.open(folder / "alive.new", os.O_RDWR | os.O_CREAT, 0o600)  # as fabricx.scratch: a later run may remove it
    os.write(lock, socket.gethostname().encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / "alive.new", folder / "alive")
    try:
        for name in names:
            (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{os.memfd_create('fabricx')}")
        passing = folder / "keeper.new"
        passing.write_text(str(os.getpid()))
        passing.rename(folder / "keeper")
        ended = select.poll()
        ended.register(watched, select.POLLIN)
        ended.poll()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
