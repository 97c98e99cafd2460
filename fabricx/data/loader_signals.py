"""Signal handling in loader processes, when a scheduler sends SIGTERM to all processes of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, final


@final
class TerminatedByTrainer:
    """`worker_init_fn` of loader processes that obey SIGTERM of the training process only.

    A scheduler that ends a job signals every process, while the training process still needs data to finish the step.

    Args:
        first: the user's `worker_init_fn`, called with the number of the loader process; None for none.
    """

    def __init__(self, first: Callable[[int], Any] | None) -> None:
        self._first = first
        self._trainer = os.getpid()  # may differ from the parent process: there may be a fork server between them

    def __setstate__(self, state: dict[str, Any]) -> None:
        _block()  # in the loader process, before torch creates threads that could receive the signal
        self.__dict__.update(state)

    def __call__(self, number: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # elsewhere the sender of a signal is unknown
            _block()
            threading.Thread(target=_wait, args=(self._trainer,), name="fabricx-signals", daemon=True).start()
        if self._first is not None:
            self._first(number)


@contextlib.contextmanager
def block_sigterm_in_forks() -> Iterator[None]:
    """Block SIGTERM in processes that are forked inside; this process handles the signal at the end of the context."""
    before = _block()
    try:
        yield
    finally:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _block() -> set[Any]:
    """Block SIGTERM in this thread and in threads that it starts; returns the signals blocked before."""
    if not hasattr(signal, "pthread_sigmask"):
        return set()
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _wait(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
