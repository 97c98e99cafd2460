"""A server's telemetry, once a second: updates, queue, staleness."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, final

from fabricx.errors import full_disk_costs
from fabricx.parameter_server.wire.messages import Counts
from fabricx.telemetry.events import EventFile

_EVERY_S: Final = 1.0


@final
class ServerRecords:
    """The records of a server.

    Args:
        run_dir: the run's folder; None to tell nothing.
        number: which server.
        traces: also tell when each gradient was applied.
    """

    def __init__(self, run_dir: Path | None, number: int, *, traces: bool = False) -> None:
        self._file: EventFile | None = None
        if run_dir is not None:
            with full_disk_costs("the records of a server"):
                self._file = EventFile(run_dir, f"server {number}")
        self._traces = traces and self._file is not None
        self._applied: deque[tuple[int, int, float, float]] = deque()
        self._pushes: dict[int, int] = {}
        self._before = Counts()
        self._over = threading.Event()

    def applied(self, worker: int, begun: float) -> None:
        """Note that the next gradient of a worker is dealt with, since a moment of the monotonic clock."""
        if self._traces:
            number = self._pushes[worker] = self._pushes.get(worker, 0) + 1
            self._applied.append((worker, number, round(begun, 6), round(time.monotonic(), 6)))

    def joined(self, worker: int) -> None:
        """Note that a worker counts its gradients from 1."""
        self._pushes.pop(worker, None)

    def tell_on(self, counts: Counts) -> bool:
        """Wait for the time, and tell what has come; returns False once it is over."""
        over = self._over.wait(_EVERY_S)
        self.tell(counts)
        return not over

    def tell(self, counts: Counts) -> None:
        """Tell what has come since the last time."""
        before, self._before = (
            self._before,
            Counts(counts.updates, counts.dropped, dict(counts.staleness), counts.lead, counts.messages, counts.queued),
        )
        messages = counts.messages - before.messages
        if self._file is None or messages <= 0:  # others came, or nothing has
            return
        fresh = {age: times - before.staleness.get(age, 0) for age, times in self._before.staleness.items()}
        gradients = sum(fresh.values())
        found = {"queue": (counts.queued - before.queued) / messages}
        if gradients > 0:
            found["staleness"] = sum(age * times for age, times in fresh.items()) / gradients
        self._file.write("serving", updates=counts.updates, messages=messages, **found)
        if self._applied:
            self._file.write("applied", applied=[self._applied.popleft() for _ in range(len(self._applied))])

    def close(self) -> None:
        """Tell nothing any more."""
        self._over.set()

    def end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
