"""Programs in virtual time: each runs as a greenlet until it waits, and a wait costs no real time.

A module that uses `threading` and `time` runs unchanged if these names refer to a `VirtualTime`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

from greenlet import getcurrent, greenlet


@final
class VirtualTime:
    """Events in the order of their times, and programs that wait for them.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._main = getcurrent()
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = itertools.count()

    def at(self, time: float, call: Callable[[], Any]) -> None:
        """Call a function later.

        Args:
            time: seconds; a time that has passed means now.
            call: a function that does not wait.
        """
        heapq.heappush(self._events, (max(time, self.now), next(self._count), call))

    def begin(self, program: Callable[[], Any]) -> None:
        """Begin a program now.

        Args:
            program: a function, which may wait.
        """
        self.at(self.now, greenlet(program, self._main).switch)

    def run(self) -> None:
        """Process all events."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def sleep(self, seconds: float) -> None:
        """Wait; called by a program.

        Args:
            seconds: virtual time.
        """
        self.at(self.now + seconds, getcurrent().switch)
        self.pause()

    def pause(self) -> None:
        """Wait until an event switches to the calling program."""
        assert getcurrent() is not self._main, "only programs wait"
        self._main.switch()

    @property
    def time(self) -> Any:
        """Return the stand-in for the module `time`."""
        return SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)

    @property
    def threading(self) -> Any:
        """Return the stand-in for the module `threading`."""
        return SimpleNamespace(
            Lock=lambda: Lock(self), RLock=lambda: Lock(self), Event=lambda: Event(self),
            Thread=lambda target, **_: Thread(self, target),
        )  # fmt: skip


@final
class Lock:
    """`threading.RLock`, held by a program.

    Args:
        time: virtual time.
    """

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._owner: greenlet | None = None
        self._depth = 0
        self._waiting: deque[greenlet] = deque()

    def __enter__(self) -> None:
        program = getcurrent()
        while self._owner not in (None, program):
            self._waiting.append(program)
            self._time.pause()
        self._owner = program
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._time.at(self._time.now, self._waiting.popleft().switch)


@final
class Event:
    """`threading.Event`.

    Args:
        time: virtual time.
    """

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._set = time, False
        self._waiting: list[greenlet] = []

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for program in waiting:
            self._time.at(self._time.now, program.switch)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        program = getcurrent()
        self._waiting.append(program)
        if timeout is not None:
            self._time.at(self._time.now + timeout, lambda: program in self._waiting and program.switch())
        self._time.pause()
        if program in self._waiting:
            self._waiting.remove(program)
        return self._set


@final
class Thread:
    """`threading.Thread`.

    Args:
        time: virtual time.
        target: function that runs as a program.
    """

    def __init__(self, time: VirtualTime, target: Callable[[], Any]) -> None:
        self._time, self._target = time, target
        self._ended = Event(time)

    def start(self) -> None:
        self._time.begin(self._run)

    def join(self) -> None:
        self._ended.wait()

    def _run(self) -> None:
        self._target()
        self._ended.set()
