"""Signals that ask a process to end, and the processes that handle them."""

from __future__ import annotations

import os
import signal
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


def hear() -> None:
    """Let these signals end this process, as they do by default."""
    for number in _ALL:
        signal.signal(number, signal.SIG_DFL)
