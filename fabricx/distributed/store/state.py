"""State machine of a run's key-value store: values, and requests that wait for them. No sockets, threads or torch."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol, final

_EXPIRED: Final = 64  # deadlines of answered requests that are kept besides two for each connection


class Caller(Protocol):
    """A connection of a process, which sends a request after the answer of the last.

    Attributes:
        wait: request that is not answered yet.
        at_end: name of a sequence and a value, which is appended when the connection ends.
    """

    wait: Wait | None
    at_end: tuple[str, bytes] | None

    def detect_loss_soon(self) -> None: ...


@final
class StoreState:
    """Values, and requests that wait for them. Processes call its operations by messages of `pack`.

    Args:
        clock: seconds.

    Attributes:
        requests: number of requests that were served.
        lock: held while a value is changed; other threads than the server's may set values.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = 0
        self.lock = threading.RLock()  # reentrant: a signal handler may set a value
        self._clock = clock
        self._values: dict[str, bytes] = {}
        self._lengths: dict[str, int] = {}  # of sequences
        self._changed: deque[str] = deque()  # keys that were set, for the requests that wait for them
        # Requests that wait for a key, oldest first, by the least number that they wait for; None for any value.
        self._waits: dict[str, dict[int | None, dict[Wait, None]]] = {}
        self._deadlines: list[tuple[float, int, Wait]] = []
        self._count = itertools.count()

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Args:
            key: key of the value.
            value: any bytes.
        """
        with self.lock:
            self._values[key] = value
            self._changed.append(key)

    def push(self, name: str, value: bytes) -> None:
        """Append a value to a sequence, the values of which are never deleted.

        Args:
            name: name of the sequence; see `PrivateStore.push_at_end`.
            value: any bytes.
        """
        with self.lock:
            number = self._lengths.get(name, 0)
            self._lengths[name] = number + 1
            self.set(f"{name}/{number}", value)

    def get(self, key: str) -> bytes | None:
        """Return a value; None if the key does not exist.

        Args:
            key: any key.
        """
        return self._values.get(key)

    def request(self, caller: Caller, message: bytes) -> bytes | None:
        """Perform a request.

        Args:
            caller: connection that has sent it.
            message: name of the operation and its arguments.

        Returns:
            the answer; None if the request waits, and `answers` will return its answer.

        Raises:
            AttributeError, TypeError, ValueError: the message is malformed.
        """
        self.requests += 1
        operation, *arguments = unpack(message)
        answer: bytes | None = getattr(self, f"_do_{operation.decode()}")(caller, *arguments)
        return answer

    def answers(self, connections: int) -> Iterator[tuple[Caller, bytes]]:
        """Yield the answers of requests that are met now, or have timed out; new requests may come meanwhile.

        Args:
            connections: number of open connections.
        """
        now = self._clock()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].pending):
            wait = heapq.heappop(self._deadlines)[2]
            if wait.pending:
                yield self._answered(wait, [])
        if len(self._deadlines) > 2 * connections + _EXPIRED:  # most of these requests have been answered
            self._deadlines = [entry for entry in self._deadlines if entry[2].pending]
            heapq.heapify(self._deadlines)
        while self._changed:
            keys: dict[str, None] = {}
            while self._changed:
                keys[self._changed.popleft()] = None
            for key in keys:
                yield from self._answers_for(key)

    def next_deadline(self) -> float | None:
        """Return the time at which a request times out; None without a request that waits."""
        return self._deadlines[0][0] if self._deadlines else None

    def ended(self, caller: Caller) -> None:
        """Forget the request of a connection that has ended, and append its value to the sequence.

        Args:
            caller: the connection.
        """
        if caller.wait is not None:
            self._forget(caller.wait)
        if caller.at_end is not None:
            self.push(*caller.at_end)

    def _answers_for(self, key: str) -> Iterator[tuple[Caller, bytes]]:
        for least, waits in tuple(self._waits.get(key, {}).items()):
            if least is not None and not reached(self._values.get(key), least):
                continue
            for wait in tuple(waits):
                if wait.pending and wait.may_be_met(key) and (existing := wait.found(self._values)):
                    yield self._answered(wait, existing)

    def _answered(self, wait: Wait, existing: Iterable[str]) -> tuple[Caller, bytes]:
        self._forget(wait)
        return wait.caller, self._packed(existing)

    def _packed(self, keys: Iterable[str]) -> bytes:
        return pack(*itertools.chain(*((key.encode(), self._values[key]) for key in keys)))

    def _forget(self, wait: Wait) -> None:
        wait.caller.wait = None
        for key, least in wait.keys.items():
            if (waits := self._waits.get(key)) is not None:
                waits[least].pop(wait, None)
                if not waits[least]:
                    del waits[least]
                if not waits:
                    del self._waits[key]

    # -- operations ---------------------------------------------------------------------------------------------

    def _do_set(self, caller: Caller, key: bytes, value: bytes) -> bytes:
        self.set(key.decode(), value)
        return b""

    def _do_wait(self, caller: Caller, seconds: bytes, every: bytes, *keys: bytes) -> bytes | None:
        """Answer when all or any of the keys exist, with these keys and their values; empty at the timeout."""
        names = dict.fromkeys(key.decode() for key in keys)
        return self._wait(Wait(caller, names, every=bool(every)), float(seconds))

    def _do_reach(self, caller: Caller, seconds: bytes, *conditions: bytes) -> bytes | None:
        """Answer when any of several numbers is large enough; the answer is that of `_do_wait`."""
        numbers: dict[str, int | None] = {
            key.decode(): int(least) for key, least in zip(conditions[::2], conditions[1::2], strict=True)
        }
        return self._wait(Wait(caller, numbers, every=False), float(seconds))

    def _wait(self, wait: Wait, seconds: float) -> bytes | None:
        """Return the answer; None if the request waits."""
        if not math.isfinite(seconds):
            raise ValueError("the time of a request is not a number")
        if existing := wait.found(self._values):
            return self._packed(existing)
        wait.caller.wait = wait
        for key, least in wait.keys.items():
            self._waits.setdefault(key, {}).setdefault(least, {})[wait] = None
        heapq.heappush(self._deadlines, (self._clock() + seconds, next(self._count), wait))
        return None

    def _do_raise_to(self, caller: Caller, key: bytes, least: bytes) -> bytes:
        with self.lock:
            name = key.decode()
            if name not in self._values or int(self._values[name]) < int(least):
                self.set(name, least)
        return b""

    def _do_add(self, caller: Caller, key: bytes, amount: bytes) -> bytes:
        with self.lock:
            value = str(int(self._values.get(key.decode(), b"0")) + int(amount)).encode()
            self.set(key.decode(), value)
            return value

    def _do_compare_set(self, caller: Caller, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self.lock:
            current = self._values.get(key.decode())
            if current == expected or (current is None and not expected):
                self.set(key.decode(), desired)
                return desired
            return expected if current is None else current

    def _do_delete_key(self, caller: Caller, *keys: bytes) -> bytes:
        with self.lock:
            return b"" if None in [self._values.pop(key.decode(), None) for key in keys] else b"1"

    def _do_push_at_end(self, caller: Caller, name: bytes, value: bytes, soon: bytes = b"") -> bytes:
        caller.at_end = name.decode(), value
        if soon:
            caller.detect_loss_soon()
        return b""

    def _do_check(self, caller: Caller, *keys: bytes) -> bytes:
        return b"1" if all(key.decode() in self._values for key in keys) else b""


@final
class Wait:
    """A request that is answered when keys exist.

    Args:
        caller: the connection that waits.
        keys: names of the keys, with the least number as which a key exists; None for any value.
        every: all of the keys have to exist; otherwise any of them is enough.
    """

    def __init__(self, caller: Caller, keys: Mapping[str, int | None], *, every: bool) -> None:
        self.caller, self.keys, self.every = caller, keys, every
        self.missing = set(keys)

    @property
    def pending(self) -> bool:
        """Return whether the request is not answered yet."""
        return self.caller.wait is self

    def found(self, values: Mapping[str, bytes]) -> list[str]:
        """Return the keys that exist if their existence meets the condition, else [].

        Args:
            values: the store's.
        """
        existing = [key for key, least in self.keys.items() if reached(values.get(key), least)]
        self.missing.difference_update(existing)
        return existing if not self.every or len(existing) == len(self.keys) else []

    def may_be_met(self, key: str) -> bool:
        """Return whether the condition may be met after a key was set.

        Args:
            key: one of the keys.
        """
        self.missing.discard(key)
        return not self.every or not self.missing


def reached(value: bytes | None, least: int | None) -> bool:
    """Return whether a value exists and, with `least`, is a number of at least `least`.

    Args:
        value: a value of the store; None if the key does not exist.
        least: the least number; None for any value.
    """
    if value is None or least is None:
        return value is not None
    with contextlib.suppress(ValueError):
        return int(value) >= least
    return False


def pack(*parts: bytes) -> bytes:
    """Join byte strings to a message.

    Args:
        parts: contents, each of less than 4 GiB.
    """
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Split a message of `pack` into its parts.

    Args:
        data: concatenation of (4 bytes of length, little-endian; content).
    """
    parts, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        parts.append(data[at + 4 : end])
        at = end
    return parts
