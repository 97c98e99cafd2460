"""Signals by which a machine's owner asks a process to end, and who is to hear them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final, NoReturn

TERMINATED: Final = 128 + signal.SIGTERM  # exit status, as shells and schedulers use it
_ALL: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


def notices() -> tuple[signal.Signals, ...]:
    """Return the signals by which a machine's owner asks a process to end; USR1 is a custom of SLURM's users."""
    return _ALL if "SLURM_JOB_ID" in os.environ else (signal.SIGTERM,)


def ignore() -> None:
    """Hear none of them: others that do will end this process in time."""
    for number in _ALL:
        signal.signal(number, signal.SIG_IGN)


def stop_now(number: int) -> NoReturn:
    """End what this process does by an exception.

    Raises:
        KeyboardInterrupt: the signal is SIGINT.
        SystemExit: with 143, for any other signal.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(TERMINATED)


def _hear() -> None:
    for number in _ALL:
        signal.signal(number, signal.SIG_DFL)


# A scheduler that ends a job signals each of its processes. The fork server would end, and nobody would know any more
# what becomes of the workers; it ends with the process that started it. Those that it forks hear as ever.
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    ignore()
    os.register_at_fork(after_in_child=_hear)
