"""Signal handling of loader processes when all processes of a run are asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, final


@final
class EndsWithItsTrainer:
    """Lets a process that loads data be ended by the one that trains, and by no other that asks it to.

    A scheduler that ends a job asks each of its processes; who trains still wants to reach the end of a step.

    Args:
        first: what the user wants to be called in each process, with its number, if anything.
    """

    def __init__(self, first: Callable[[int], Any] | None) -> None:
        self._first = first
        self._trainer = os.getpid()  # it needn't be the parent: there may be a fork server between them

    def __call__(self, number: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # else nobody can tell who has asked
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # also in threads that are started from here on
            threading.Thread(target=_wait, args=(self._trainer,), name="fabricx-signals", daemon=True).start()
        if self._first is not None:
            self._first(number)


def _wait(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
