"""Lock file that admits a single run at a time to a folder."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

DETACHED: Final = (
    "detached: "  # begins the label of a run whose calling process has died; its name in the cluster follows
)
_FILE: Final = "running"
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of some network file systems, such as Lustre
_ASKED_S: Final = 0.5  # seconds; `lock_owner` in a second process takes the lock for an instant


@contextlib.contextmanager
def exclusive_run(run_dir: Path, label: str = "") -> Iterator[None]:
    """Hold the lock of a run's folder; the system releases it at the end of this process, even after SIGKILL.

    Args:
        run_dir: the folder; created if missing.
        label: text that `lock_owner` returns to other processes.

    Raises:
        ValueError: a different process holds the lock.
    """
    if importlib.util.find_spec("fcntl") is None:  # systems without file locks
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / _FILE
    with _locked(path, run_dir) as file:
        file.truncate(0)
        file.write(f"{os.getpid()} {label}".rstrip())
        file.flush()
        try:
            yield
        finally:
            if _is_at(path, file):
                path.unlink(missing_ok=True)


def _locked(path: Path, run_dir: Path) -> TextIO:
    """Open and lock the file at a path. A file that was deleted between the two operations is opened again."""
    import fcntl

    end = time.monotonic() + _ASKED_S
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
            file.close()
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read()
            if time.monotonic() > end:
                raise occupied(run_dir, owner) from None
            time.sleep(_ASKED_S / 10)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                print(
                    f"{run_dir} is on a file system without locks: make sure that no second run uses this folder",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                return file
            file.close()
            raise
        except BaseException:
            file.close()
            raise


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def occupied(run_dir: Path, owner: str) -> ValueError:
    """Return the error for a folder in which a process trains already.

    Args:
        run_dir: the folder.
        owner: result of `lock_owner`.
    """
    process, _, label = owner.partition(" ")
    if is_detached(owner):
        name = re.sub(r"[^\w-]", "", label.removeprefix(DETACHED))  # of a file that other users may have written
        return ValueError(
            f"the run in {run_dir} continues, although the process that started it has died: wait until it ends, or "
            f"stop it: python -m fabricx.launchers.ray_standby {name}"
        )
    return ValueError(f"process {process or '?'} is training in {run_dir}: wait until it ends, or stop it with Ctrl-C")


def is_detached(owner: str) -> bool:
    """Return whether a run continues without the process that has started it.

    Args:
        owner: result of `lock_owner`.
    """
    return owner.partition(" ")[2].startswith(DETACHED)


def lock_owner(run_dir: Path) -> str | None:
    """Return the process id and the label of the process that trains in a folder; None if no process does.

    Args:
        run_dir: the folder of a run, which may be read-only.
    """
    try:
        import fcntl

        with (run_dir / _FILE).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read()
    except (ImportError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return None
