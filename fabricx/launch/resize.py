"""External requests for more or fewer workers of a running run."""

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

from fabricx.launch.run_lock import who_is_here

ELASTIC: Final = "elastic"  # what such a run says of itself
MOST: Final = max(64, 8 * (os.cpu_count() or 1))  # workers of one machine; a larger number is a mistake
_WISH: Final = "workers"  # the file that holds the number
_NUMBER: Final = re.compile(rb"\s*([0-9]{1,9})\s*")
_WRITING_S: Final = 1.0  # an empty file may be one that a shell has opened and not written yet


def ask(run_dir: Path, workers: int) -> None:
    """Ask the run in a folder for so many workers; it takes them in, or lets them go, between two steps.

    Raises:
        ValueError: nobody trains there, or with a strategy that can't change its workers; or the number is none that a
            run can have.
    """
    if not 1 <= workers <= MOST:
        raise ValueError(f"{workers} workers: 1 to {MOST} are possible on this machine")
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} isn't a run's folder")
    here = who_is_here(run_dir)
    if here is None:
        raise ValueError(f"nobody trains in {run_dir}; go on with it by: fabricx resume {run_dir} trainer.devices=...")
    if ELASTIC not in here.split():
        raise ValueError(
            f"the run in {run_dir} can't change its workers while it goes on: that takes several devices, and "
            "FaultRecovery (async_sgd goes without), on CPUs, and no pull_compression where servers step. Stop it "
            f"(Ctrl-C), and: fabricx resume {run_dir} trainer.devices={workers}"
        )
    fresh = run_dir / f".{_WISH}-{secrets.token_hex(4)}"
    try:
        fresh.write_text(str(workers))
        os.replace(fresh, run_dir / _WISH)
    except OSError as error:
        raise ValueError(f"the run in {run_dir} can't be asked: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)


@final
class Requests:
    """Reads what `ask` has written. Whatever else is in the place of the file costs one warning, and no run.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _WISH
        self._refused: object = None  # the file that was warned of, should it still be there

    def take(self) -> int | None:
        """Return how many workers were asked for since the last call, if any number was."""
        try:
            found = self._path.lstat()
        except OSError:
            return None
        if (found.st_ino, found.st_mtime_ns) == self._refused:
            return None
        if not found.st_size and stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime < _WRITING_S:
            return None
        try:
            number = _NUMBER.fullmatch(self._content(found))
            if number is not None and 1 <= int(number[1]) <= MOST:
                return int(number[1])
            reason = f"it doesn't hold a number from 1 to {MOST}"
        except OSError as error:
            reason = str(error)
        self._refused = (found.st_ino, found.st_mtime_ns)
        text = (
            f"a request for other workers is ignored, and training goes on: {self._path}: {reason}; use fabricx scale"
        )
        print(text, file=sys.stderr, flush=True)  # a warning would end a run under `-W error`
        return None

    def _content(self, found: os.stat_result) -> bytes:
        """Return the first bytes of the file, which is taken away."""
        if not stat.S_ISREG(found.st_mode):  # a pipe would block
            raise OSError("it isn't a file")
        taken = self._path.with_name(f".{_WISH}-{secrets.token_hex(4)}")
        os.rename(self._path, taken)  # what is asked meanwhile is another file
        try:
            with open(os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return file.read(64)
        finally:
            with contextlib.suppress(OSError):
                taken.unlink()
