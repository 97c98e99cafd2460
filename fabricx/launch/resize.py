"""Requests of other processes to change the number of workers of a run in progress."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import time
from pathlib import Path
from typing import Final, final

from fabricx.launch.run_lock import lock_owner

ELASTIC: Final = "elastic"  # label, in the lock file, of runs that accept requests
MAX_WORKERS: Final = max(64, 8 * (os.cpu_count() or 1))  # per machine; larger numbers are assumed to be mistakes
_REQUEST_FILE: Final = "workers"  # file with the requested number, in the run's folder
_NUMBER: Final = re.compile(rb"\s*([0-9]{1,9})\s*")
_WRITING_S: Final = 1.0  # an empty file younger than this may have been opened, but not written yet, by a shell


def request_workers(run_dir: Path, workers: int) -> None:
    """Request a number of workers of the run in a folder; workers join or leave it between two steps.

    Args:
        run_dir: the run's folder.
        workers: number of workers, from 1 to `MAX_WORKERS`.

    Raises:
        ValueError: no process trains in the folder, its run cannot change the number of workers, or the number is out
            of range.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"{workers} workers: must be 1 to {MAX_WORKERS} on this machine")
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not the folder of a run")
    owner = lock_owner(run_dir)
    if owner is None:
        raise ValueError(
            f"no process trains in {run_dir}; to resume this run:\n  fabricx resume {run_dir} trainer.devices=..."
        )
    if ELASTIC not in owner.split():
        raise ValueError(
            f"the run in {run_dir} can't change its number of workers: this requires several devices, CPUs, "
            "FaultRecovery (except for async_sgd), and no pull_compression if servers step the optimizer. Stop the run "
            f"(Ctrl-C), then: fabricx resume {run_dir} trainer.devices={workers}"
        )
    fresh = run_dir / f".{_REQUEST_FILE}-{secrets.token_hex(4)}"
    try:
        fresh.write_text(str(workers))
        os.replace(fresh, run_dir / _REQUEST_FILE)
    except OSError as error:
        raise ValueError(f"could not write the request to {run_dir}: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)


def forget_request(run_dir: Path) -> None:
    """Remove a request that an earlier run in a folder has not read before its end.

    Args:
        run_dir: folder of a run that begins.
    """
    if (workers := Requests(run_dir).take()) is not None:
        text = f"ignored an earlier request for {workers} workers, which the run in {run_dir} had not received"
        print(text, file=sys.stderr, flush=True)


@final
class Requests:
    """Read the requests that `request_workers` writes. An invalid file causes a single message and no error.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _REQUEST_FILE
        self._refused: object = None  # inode and time of the invalid file that was reported

    def take(self) -> int | None:
        """Return the number of workers requested since the last call, or None."""
        try:
            status = self._path.lstat()
        except OSError:
            return None
        if (status.st_ino, status.st_mtime_ns) == self._refused:
            return None
        if not status.st_size and stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime < _WRITING_S:
            return None
        try:
            number = _NUMBER.fullmatch(self._content(status))
            if number is not None and 1 <= int(number[1]) <= MAX_WORKERS:
                return int(number[1])
            reason = f"it does not contain a number from 1 to {MAX_WORKERS}"
        except OSError as error:
            reason = str(error)
        self._refused = (status.st_ino, status.st_mtime_ns)
        print(  # a warning would end a run under `-W error`
            f"ignored a request to change the number of workers: {self._path}: {reason}. To request a number: fabricx "
            f"scale {self._path.parent} WORKERS", file=sys.stderr, flush=True,
        )  # fmt: skip
        return None

    def _content(self, status: os.stat_result) -> bytes:
        """Remove the file and return its first bytes."""
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise OSError("it is not a regular file")
        moved = self._path.with_name(f".{_REQUEST_FILE}-{secrets.token_hex(4)}")
        os.rename(self._path, moved)  # a concurrent request creates a new file
        try:
            with open(os.open(moved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read(64)
        finally:
            with contextlib.suppress(OSError):
                moved.unlink()
