"""Private temporary folders that are removed after the end of their process, even if it was killed.

A folder is locked while its process lives. The folder of a killed process is removed by its workers, or by the next
process that creates such a folder on the same machine. Semaphores of a run's processes are removed with its folder.
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
except ImportError:  # systems without file locks: abandoned folders are not removed
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "fabricx-"  # of the names of folders
LOCK: Final = "alive"  # lock file in a folder
SEMAPHORES: Final = "/dev/shm"  # folder in which Linux shows semaphores
_MAX_ADDRESS: Final = 107  # largest size of the address of a Unix socket, bytes
_LONGEST_NAME: Final = len("/fabricx-12345678/mp/listener-12345678") + 4  # length of the longest path of a socket
_SHORT_FOLDERS: Final = ("XDG_RUNTIME_DIR", "/tmp", "/var/tmp", "/dev/shm")  # used for sockets if TMPDIR is too long


@contextlib.contextmanager
def private_folder(parent: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Create a folder of mode 700, which is removed at the end of the context, or later if its process is killed.

    Args:
        parent: parent folder; default: the folder for temporary files (`TMPDIR`).

    Returns:
        context with the path of the folder.

    Raises:
        OSError: the folder cannot be created, or other users could replace it; the message names the remedy.
    """
    parent = os.fspath(parent or _temporary())
    _check_sticky(parent)
    sweep(parent)
    folder = None
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        lock = _locked(folder)
    except OSError as error:
        if folder is not None:  # without a lock it would never be removed
            shutil.rmtree(folder, ignore_errors=True)
        text = f"could not create a temporary folder in {parent}: {error.strerror}; set TMPDIR to a folder with space"
        raise OSError(error.errno, text) from None
    process = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == process:  # not in a forked child that discards this context
            _remove(folder)
        os.close(lock)


def _temporary() -> str:
    try:
        return tempfile.gettempdir()  # falls back to other folders if TMPDIR does not exist or is not writable
    except FileNotFoundError as error:
        raise OSError(error.errno, f"{error.strerror or error}; set TMPDIR to a writable folder") from None


def _check_sticky(parent: str) -> None:
    """Refuse a folder that is writable for all users without the sticky bit, where any user can rename any file.

    Raises:
        PermissionError: the folder is such a folder.
    """
    mode = os.stat(parent).st_mode if os.path.isdir(parent) else 0
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM,
            f"any user can replace the files of this user in {parent}: run chmod +t {parent}, or set TMPDIR to another "
            "folder",
        )


def _locked(folder: str) -> int:
    """Lock a folder while this process lives; the lock file is renamed to its name after it is locked."""
    temporary = os.path.join(folder, f".{LOCK}-{secrets.token_hex(4)}")
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(lock, socket.gethostname().encode())
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(temporary, os.path.join(folder, LOCK))
    except OSError:
        os.close(lock)
        raise
    return lock


def sweep(parent: str) -> None:
    """Remove the folders of this user's processes that died on this machine.

    Args:
        parent: parent folder.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                remove_if_abandoned(entry.path)


def remove_if_abandoned(folder: str, wait_s: float = 0.0) -> bool:
    """Remove a private folder if its process died.

    Args:
        folder: the private folder.
        wait_s: seconds to wait for the death of its process.

    Returns:
        whether the process died and the folder was removed.
    """
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
        if os.read(lock, 256) != socket.gethostname().encode():  # the folder is shared with a different machine
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
        return True
    except OSError:  # locked: its process lives
        return False
    finally:
        os.close(lock)


def _remove(folder: str) -> None:
    prefix = _config(multiprocessing.process.current_process()).get("semprefix", "")
    _unlink_semaphores(_semaphores_of(folder), tracked=prefix.startswith(_semaphores_of(folder)))
    shutil.rmtree(folder, ignore_errors=True)


# -- multiprocessing's sockets and semaphores ---------------------------------------------------------------------


def set_multiprocessing_folder() -> None:
    """Set a private folder for sockets and files of Python's multiprocessing in this process.

    multiprocessing's default folders (`pymp-*`) are not removed if a process ends without running finalizers, as
    workers and killed processes do, and a long TMPDIR makes the addresses of sockets too long. Child processes inherit
    the folder.
    """
    config = _config(multiprocessing.process.current_process())
    if config.get("tempdir") is None:
        stack = contextlib.ExitStack()
        config["tempdir"] = stack.enter_context(private_folder(_short()))
        util.Finalize(None, stack.close, exitpriority=-100)  # multiprocessing's priority: after all users of the folder


def multiprocessing_folder_of(process: Any, folder: str, rank: int) -> None:
    """Set the private folder of a run for multiprocessing's sockets and semaphores in a process, before its start.

    Args:
        process: a process that is not started yet. Its sockets will be created in the folder, and the names of its
            semaphores will contain the folder's name.
        folder: folder from `private_folder`.
        rank: number of the process, unique among the live processes of the run.
    """
    if sys.platform == "linux":  # other systems do not list semaphores, and limit their names to fewer characters
        _config(process)["semprefix"] = f"{_semaphores_of(folder)}{rank}"
    path = os.path.join(folder, "mp")
    if _fits(os.path.dirname(folder)):
        Path(path).mkdir(mode=0o700, exist_ok=True)
        _config(process)["tempdir"] = path
    # Otherwise the process inherits the folder of this process, which is short enough.


def unlink_semaphores_of(process: Any) -> None:
    """Remove the semaphores of a process of this run that ended, because a killed process does not remove them.

    Args:
        process: the process.
    """
    if prefix := _config(process).get("semprefix"):
        _unlink_semaphores(f"{prefix}-", tracked=True)


def _semaphores_of(folder: str) -> str:
    return f"/mp-{os.path.basename(folder)}-"


def _unlink_semaphores(prefix: str, *, tracked: bool) -> None:
    """Unlink all semaphores with a prefix.

    Args:
        prefix: prefix of the names, including the initial slash.
        tracked: the semaphores are registered with this process's resource tracker, and must be unregistered.
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
    """Return a folder with a path that is short enough for sockets; None if the default temporary folder is."""
    if _fits(_temporary()):
        return None
    for name in _SHORT_FOLDERS:
        path = os.environ.get(name, "") if not name.startswith("/") else name
        if path and _fits(path) and os.access(path, os.W_OK | os.X_OK):
            return path
    raise OSError(
        f"TMPDIR is too long for sockets ({_temporary()}), and no shorter folder is writable; set TMPDIR to a shorter "
        "path"
    )


def _fits(parent: str) -> bool:
    return len(os.fsencode(parent)) + _LONGEST_NAME <= _MAX_ADDRESS
