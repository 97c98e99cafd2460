"""Signals that request the end of a process, and their handling."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Final, NoReturn, final

TERMINATED: Final = 128 + signal.SIGTERM  # exit status, as shells and schedulers use it
_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which a scheduler requests the end of a process; SIGUSR1 is customary under SLURM."""
    return _SIGNALS if "SLURM_JOB_ID" in os.environ else (signal.SIGTERM,)


def ignore() -> None:
    """Ignore termination signals; a process that handles them ends this process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop_now(number: int) -> NoReturn:
    """Raise the exception that a signal stands for.

    Args:
        number: number of the signal.

    Raises:
        KeyboardInterrupt: the signal is SIGINT.
        SystemExit: with 143, for any other signal.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(TERMINATED)


def announce_stop() -> None:
    """Print that the run stops; called by a handler after the request, since the output may have no reader any more."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # RuntimeError: the signal has interrupted a print
        print("\nstopping at the next step; press Ctrl-C again to stop immediately", file=sys.stderr, flush=True)


def call_own(handler: Any, number: int, frame: FrameType | None) -> None:
    """Call the handler that a program has set for a signal; does nothing for the default handlers.

    Args:
        handler: result of `signal.getsignal`.
        number: number of the signal.
        frame: interrupted frame.
    """
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, frame)


def restore() -> None:
    """Restore the default handling of termination signals: they end the process."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and termination signals by a function; only in the main thread, as other threads get no signals.

    Handlers that the program has set are called before.

    Args:
        handler: called with the number of the signal and the interrupted frame.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, *termination_signals())}

    def handle(number: int, frame: FrameType | None) -> None:
        call_own(before[number], number, frame)
        handler(number, frame)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def block() -> None:
    """Delay signals that end or stop a run until this process has `EarlySignals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *termination_signals()))


@final
class EarlySignals:
    """Signals that arrive before this process can handle them, and signals that are delayed since `block`."""

    def __init__(self) -> None:
        self._received, self._process = list[int](), os.getpid()
        for number in (signal.SIGINT, *termination_signals()):
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *termination_signals()))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._received.append(number)
        else:  # a forked process
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def repeat(self) -> None:
        """Raise the signals again, in a process that handles them now."""
        for number in self._received.copy():
            signal.raise_signal(number)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Return a context in which processes are started that `block`: the new process inherits it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    block()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@final
class StopRequests:
    """Signals that a process receives while it waits for ranks that a cluster runs.

    Args:
        stops_at_step: the ranks can stop at their next step.
    """

    def __init__(self, *, stops_at_step: bool) -> None:
        self._stops_at_step, self._received, self._passed = stops_at_step, list[int](), 0

    def __bool__(self) -> bool:
        return bool(self._received)

    def received(self) -> AbstractContextManager[None]:
        """Receive the signals while the context is active."""
        return handled(lambda number, frame: self.add(number))

    def add(self, number: int) -> None:
        """Add a signal that this process has not received itself.

        Args:
            number: number of the signal.
        """
        self._received.append(number)

    def arrived(self, *, begun: Callable[[], bool] = lambda: True) -> int | None:
        """Return a signal that has arrived since the last call and that the ranks have to receive, or None.

        Args:
            begun: returns whether a rank has begun; if none has, there is nothing to stop at its next step.

        Raises:
            KeyboardInterrupt, SystemExit: a second signal has arrived, or the ranks cannot stop at their next step.
        """
        if len(self._received) == self._passed:
            return None
        self._passed = len(self._received)
        number = self._received[-1]
        if self._passed > 1 or not self._stops_at_step or not begun():
            stop_now(number)
        print("stopping at the next step; press Ctrl-C again to stop immediately", flush=True)
        return number
