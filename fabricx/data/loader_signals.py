"""Signal handling of loader processes when all processes of a run are asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        _block()  # in a process that loads data, before torch makes threads there, one of which could take the signal
        self.__dict__.update(state)

    def __call__(self, number: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # else nobody can tell who has asked
            _block()
            threading.Thread(target=_wait, args=(self._trainer,), name="fabricx-signals", daemon=True).start()
        if self._first is not None:
            self._first(number)


@contextlib.contextmanager
def forks_are_not_ended() -> Iterator[None]:
    """Let processes that are forked inside begin with SIGTERM blocked; here it is handled a moment later."""
    before = _block()
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _block() -> set[Any]:
    """Block SIGTERM in this thread and in threads that it starts; returns what was blocked before."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _wait(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
