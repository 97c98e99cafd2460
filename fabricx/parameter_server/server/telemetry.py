"""Telemetry of a server, written every second: updates, queue, staleness."""

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
class ServerTelemetry:
    """Telemetry records of a server.

    Args:
        run_dir: the run's folder; None for no records.
        number: number of the server.
        traces: also record when each gradient was applied.
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
        """Record that the next gradient of a worker was processed.

        Args:
            worker: number of the worker.
            begun: start of processing, on the monotonic clock, in seconds.
        """
        if self._traces:
            number = self._pushes[worker] = self._pushes.get(worker, 0) + 1
            self._applied.append((worker, number, round(begun, 6), round(time.monotonic(), 6)))

    def joined(self, worker: int) -> None:
        """Reset the count of a worker's gradients.

        Args:
            worker: number of the worker.
        """
        self._pushes.pop(worker, None)

    def wait_and_write(self, counts: Counts) -> bool:
        """Wait for the next interval and write; returns False after `close`.

        Args:
            counts: present counts of the server.
        """
        over = self._over.wait(_EVERY_S)
        self.write(counts)
        return not over

    def write(self, counts: Counts) -> None:
        """Write the differences since the last call.

        Args:
            counts: present counts of the server.
        """
        before, self._before = (
            self._before,
            Counts(counts.updates, counts.dropped, dict(counts.staleness), counts.lead, counts.messages, counts.queued),
        )
        messages = counts.messages - before.messages
        if self._file is None or messages <= 0:  # no messages, or a new server with new counts
            return
        fresh = {age: times - before.staleness.get(age, 0) for age, times in self._before.staleness.items()}
        gradients = sum(fresh.values())
        values = {"queue": (counts.queued - before.queued) / messages}
        if gradients > 0:
            values["staleness"] = sum(age * times for age, times in fresh.items()) / gradients
        self._file.write("serving", updates=counts.updates, messages=messages, **values)
        if self._applied:
            self._file.write("applied", applied=[self._applied.popleft() for _ in range(len(self._applied))])

    def close(self) -> None:
        """Make `wait_and_write` return, at the end of the server."""
        self._over.set()

    def end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
