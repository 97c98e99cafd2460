"""Private temporary folders that are removed with their process, however it ends.

A folder is locked as long as its process lives. What a killed process has left is removed by its workers, or by the
next process that makes such a folder on the same machine. Semaphores of a run's processes go with its folder.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.process
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any, Final

try:
    import fcntl
except ImportError:  # a system without such locks: nothing is swept
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "fabricx-"
LOCK: Final = "alive"
SEMAPHORES: Final = "/dev/shm"
_ADDRESS: Final = 107  # bytes that the address of a Unix socket holds
_NAME: Final = len("/fabricx-12345678/mp/listener-12345678") + 4  # the longest name of a socket in it
_SHORT: Final = ("XDG_RUNTIME_DIR", "/tmp", "/var/tmp", "/dev/shm")  # where sockets go if TMPDIR is too long


@contextlib.contextmanager
def private_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Make a folder of mode 700, which is removed when the context ends, or some time after its process was killed.

    Args:
        parent: where; the folder for temporary files (`TMPDIR`) by default.

    Raises:
        OSError: it can't be made, or others could put another in its place; the message says what to do.
    """
    parent = os.fspath(parent or _temporary())
    _check_that_names_stay(parent)
    sweep(parent)
    folder = None
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        lock = _locked(folder)
    except OSError as error:
        if folder is not None:  # without its lock it would never be swept
            shutil.rmtree(folder, ignore_errors=True)
        text = f"no temporary folder can be made in {parent}: {error.strerror}; let TMPDIR name a folder with room"
        raise OSError(error.errno, text) from None
    process = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == process:  # a forked child that throws this context away leaves the folder to its parent
            _remove(folder)
        os.close(lock)


def _temporary() -> str:
    try:
        return tempfile.gettempdir()  # another one where TMPDIR isn't there or can't be written to
    except FileNotFoundError as error:
        raise OSError(
            error.errno, f"{error.strerror or error}; let TMPDIR name a folder that can be written to"
        ) from None


def _check_that_names_stay(parent: str) -> None:
    """Refuse a folder in which every user can rename what others have made, private or not.

    Raises:
        PermissionError: it is one.
    """
    mode = os.stat(parent).st_mode if os.path.isdir(parent) else 0
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM,
            f"every user can replace what this one makes in {parent}: chmod +t {parent}, or let TMPDIR name another",
        )


def _locked(folder: str) -> int:
    """Lock a folder as long as this process lives; the lock has its name only once it is held."""
    passing = os.path.join(folder, f".{LOCK}-{secrets.token_hex(4)}")
    lock = os.open(passing, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(lock, socket.gethostname().encode())
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(passing, os.path.join(folder, LOCK))
    except OSError:
        os.close(lock)
        raise
    return lock


def sweep(parent: str) -> None:
    """Remove the folders of this user's processes that have died on this machine."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                remove_if_abandoned(entry.path)


def remove_if_abandoned(folder: str, wait_s: float = 0.0) -> bool:
    """Remove a folder whose process has died; returns whether it had, within so many seconds."""
    deadline = time.monotonic() + wait_s
    while not (abandoned := _abandoned(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return abandoned


def _abandoned(folder: str) -> bool:
    if fcntl is None:
        return False
    try:
        if os.lstat(folder).st_uid != os.geteuid():
            return False
        lock = os.open(os.path.join(folder, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if os.read(lock, 256) != socket.gethostname().encode():  # another machine's, in a folder that they share
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
        return True
    except OSError:  # its process lives
        return False
    finally:
        os.close(lock)


def _remove(folder: str) -> None:
    own = _config(multiprocessing.process.current_process()).get("semprefix", "")
    _unlink_semaphores(_semaphores_of(folder), tracked=own.startswith(_semaphores_of(folder)))
    shutil.rmtree(folder, ignore_errors=True)


# -- multiprocessing's sockets and semaphores ---------------------------------------------------------------------


def give_multiprocessing_a_folder() -> None:
    """Let the sockets and files of Python's multiprocessing in this process lie where they are found and removed.

    Its own folders (`pymp-*`) stay behind when a process ends without its finalizers, as workers and killed processes
    do, and a long TMPDIR makes their sockets' addresses too long. Processes that it starts inherit the folder.
    """
    config = _config(multiprocessing.process.current_process())
    if config.get("tempdir") is None:
        stack = contextlib.ExitStack()
        config["tempdir"] = stack.enter_context(private_folder(_short()))
        util.Finalize(None, stack.close, exitpriority=-100)  # as its own: after all that may use the folder


def multiprocessing_folder_of(process: Any, folder: str, rank: int) -> None:
    """Let what multiprocessing makes in a process that isn't started yet be found by the private folder of its run.

    Args:
        process: whose sockets will be in the folder, and whose semaphores will have its name.
        folder: from `private_folder`.
        rank: of the process, which no other live process of the run has.
    """
    if sys.platform == "linux":  # other systems don't list semaphores, and have shorter names for them
        _config(process)["semprefix"] = f"{_semaphores_of(folder)}{rank}"
    place = os.path.join(folder, "mp")
    if _fits(os.path.dirname(folder)):
        Path(place).mkdir(mode=0o700, exist_ok=True)
        _config(process)["tempdir"] = place
    # else it inherits that of this process, which is short


def unlink_semaphores_of(process: Any) -> None:
    """Remove the semaphores of a process of this run that has ended: one that was killed has removed none of them."""
    if prefix := _config(process).get("semprefix"):
        _unlink_semaphores(f"{prefix}-", tracked=True)


def _semaphores_of(folder: str) -> str:
    return f"/mp-{os.path.basename(folder)}-"


def _unlink_semaphores(prefix: str, *, tracked: bool) -> None:
    """Unlink all semaphores whose name begins so.

    Args:
        prefix: with the slash that such names begin with.
        tracked: the resource tracker of this process knows them, and would miss them at its end.
    """
    with contextlib.suppress(OSError), os.scandir(SEMAPHORES) as files:
        for file in files:
            name = file.name.removeprefix("sem.")
            if name != file.name and f"/{name}".startswith(prefix):
                os.unlink(file.path)
                if tracked:
                    resource_tracker.unregister(f"/{name}", "semaphore")


def _config(process: Any) -> dict[str, Any]:
    config: dict[str, Any] = process._config
    return config


def _short() -> str | None:
    """Return a folder in which addresses of sockets aren't too long; None for the folder for temporary files."""
    if _fits(_temporary()):
        return None
    for name in _SHORT:
        place = os.environ.get(name, "") if not name.startswith("/") else name
        if place and _fits(place) and os.access(place, os.W_OK | os.X_OK):
            return place
    raise OSError(
        f"TMPDIR is too long for sockets ({_temporary()}), and no shorter folder can be written to: set TMPDIR"
    )


def _fits(parent: str) -> bool:
    return len(os.fsencode(parent)) + _NAME <= _ADDRESS
