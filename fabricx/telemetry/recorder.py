"""Record the time that a rank spends in each span: the training thread marks laps, a second thread writes them.

A lap is the time between two marks, attributed to a span.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.world import WAITED_S, World
from fabricx.telemetry.events import EventFile, Span, finite, interval_s
from fabricx.telemetry.logs import LogSettings, logging_to

_MANY: Final = 4  # rows of a record, if records are further apart than a second
_STUCK_S: Final = 5.0  # seconds without a lap after which the training thread's source line is recorded
_DOUBLING_BYTES: Final = 2**26  # each time a file grows by this size, the number of steps per row doubles
_clock = time.monotonic


class Waiting(Protocol):
    """Counters of the time that a rank waits for other processes.

    Attributes:
        servers: number of parameter servers.
        waited_s: seconds spent waiting so far.
        pushed_s: seconds spent sending gradients to servers so far.
        waits_for_servers: `waited_s` is time spent waiting for servers rather than for ranks.
    """

    servers: int
    waited_s: float
    pushed_s: float
    waits_for_servers: bool

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        """Return the newest gradients sent to servers: (worker, number of the gradient, monotonic time in seconds)."""
        ...


class _NoWaiting:
    servers = 0
    waited_s = pushed_s = 0.0
    waits_for_servers = False
    pushes: deque[tuple[int, int, float]] = deque(maxlen=0)  # noqa: RUF012  # always empty, so never mutated


class NoopRecorder:
    """A recorder that records nothing.

    Attributes:
        on: whether records are written.
        samples: samples of this rank since the last weight update.
    """

    on = False
    samples = 0
    waiting: Waiting = _NoWaiting()
    enclosing = Span.OTHER  # span of the code that is not within a more specific span

    def begin(self) -> None:
        """Start measuring; the time before this call belongs to no span."""

    def trace_laps(self, *, on: bool) -> None:
        """Write each lap in addition to the sums per step, or the sums only, from now on.

        Args:
            on: each lap is written.
        """

    def lap(self, span: Span) -> None:
        """End a lap.

        Args:
            span: category of the time since the previous lap.
        """

    @contextlib.contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Attribute the time in the context to a span.

        Args:
            span: category of the time.
        """
        outer, self.enclosing = self.enclosing, span
        self.lap(outer)
        try:
            yield
        finally:
            self.lap(span)
            self.enclosing = outer

    def end_step(self, step: int) -> None:
        """End a step: the weight update and the callbacks after it. `samples` is recorded and reset.

        Args:
            step: number of weight updates.
        """
        self.samples = 0

    def event(self, name: str, text: str, step: int, **numbers: float) -> None:
        """Record an event.

        Args:
            name: kind of event, such as "recovery".
            text: description for users.
            step: number of weight updates.
            **numbers: further values, such as `seconds`.
        """

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record metrics logged by the module.

        Args:
            values: values by name.
            step: number of weight updates.
        """

    def gauges(self, values: Mapping[str, float], step: int) -> None:
        """Record measurements of the training, such as gradient norms.

        Args:
            values: values by name.
            step: number of weight updates.
        """

    def rewind(self, step: int) -> None:
        """Record that the run rolled back.

        Args:
            step: the earlier step from which training continues.
        """

    def became(self, rank: int, size: int, generation: int) -> None:
        """Record a new rank of this process.

        Args:
            rank: the new rank.
            size: world size.
            generation: number of the process group.
        """

    def update_attributes(self, **fields: Any) -> None:
        """Record attributes of this rank that were unknown at its start.

        Args:
            **fields: plain data.
        """

    def totals(self) -> tuple[dict[str, float], int]:
        """Return seconds by span so far, and the number of steps."""
        return {}, 0

    def close(self, ending: str) -> None:
        """Write the remaining records.

        Args:
            ending: how the run ended.
        """


@final
class Results(NoopRecorder):
    """Record only the metrics, for an evaluation after a run, next to the records of that run.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = EventFile(run_dir, "results")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._file.write("metrics", step=step, values=finite(values))

    def close(self, ending: str) -> None:
        self._file.close()


@final
class Recorder(NoopRecorder):
    """Record a rank's activity. A lap costs the training thread a tuple; a second thread processes laps every second.

    Args:
        file: file for the records.
        waiting: counters of the rank's waiting time.
        device: device of the rank.
        logs: context that redirects Python's logs to the file; entered now, exited by `close`.
        ranks: number of ranks; many ranks write fewer records each.
    """

    on = True

    def __init__(
        self, file: EventFile, waiting: Waiting, device: torch.device,
        logs: contextlib.AbstractContextManager[None] | None = None, ranks: int = 1,
    ) -> None:  # fmt: skip
        self._logs = contextlib.ExitStack()
        if logs is not None:
            self._logs.enter_context(logs)
        self._file, self.waiting, self._device = file, waiting, device
        self.samples = 0
        self._every_lap = False
        self._laps: deque[tuple[Any, ...]] = deque()
        self._last: tuple[float, float, float, float] | None = None  # time and counters at the end of the last lap
        self._sums: dict[str, float] = {}  # seconds by span of the incomplete row
        self._samples = self._steps = 0  # samples and steps of the incomplete row
        self._stride = 1  # steps per row
        self._doublings, self._interval_s = 0, interval_s(ranks)
        self._traced = False  # the last lap was written to the trace
        self._all: dict[str, float] = {}  # seconds by span of all rows
        self._all_steps = 0
        self._step = 0
        self._cpu = (_clock(), _cpu_s())
        self._closed = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fabricx-telemetry", daemon=True)
        self._thread.start()

    def trace_laps(self, *, on: bool) -> None:
        self._every_lap = on

    def begin(self) -> None:
        self._laps.append((None, self._every_lap, _clock(), self.waiting.waited_s, WAITED_S[0], self.waiting.pushed_s))

    def lap(self, span: Span) -> None:
        waiting = self.waiting
        self._laps.append((span, self._every_lap, _clock(), waiting.waited_s, WAITED_S[0], waiting.pushed_s))

    def end_step(self, step: int) -> None:
        waiting = self.waiting
        now = (_clock(), waiting.waited_s, WAITED_S[0], waiting.pushed_s)
        self._laps.append((Span.OTHER, self._every_lap, *now, step, self.samples))
        self.samples = 0

    def event(self, name: str, text: str, step: int, **numbers: float) -> None:
        self._file.write("event", name=name, text=text, step=step, **finite(numbers))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._file.write("metrics", step=step, values=finite(values))

    def gauges(self, values: Mapping[str, float], step: int) -> None:
        self._file.write("gauges", step=step, values=finite(values))

    def rewind(self, step: int) -> None:
        self._file.write("rewind", step=step)

    def became(self, rank: int, size: int, generation: int) -> None:
        self._write()  # records so far belong to the former rank
        self._file.rank = rank
        self._file.write("became", size=size, generation=generation)

    def update_attributes(self, **fields: Any) -> None:
        self._file.write("known", **fields)

    def totals(self) -> tuple[dict[str, float], int]:
        self._write()
        return dict(self._all), self._all_steps

    def close(self, ending: str) -> None:
        self._closed.set()
        self._thread.join()
        self._logs.close()
        self._write()
        self._write_rest()
        self._file.write("end", ending=ending, step=self._step, memory_mib=round(_memory_mib(), 1))
        self._file.close()

    # -- in the writing thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._write()
            self._write_heartbeat()

    def _write(self) -> None:
        """Write the new laps: a column for each span, a row for each step."""
        with self._busy:
            rows: list[tuple[int, float, int, dict[str, float]]] = []
            raw: list[tuple[str | None, float, float]] = []
            for lap in self._new_laps():
                if lap[0] is None:  # the sequence of laps was interrupted
                    self._write_rows(rows)
                    self._write_rest()
                    rows = []
                self._process_lap(lap, rows, raw)
            if raw:
                self._file.write("laps", laps=raw)
                if pushed := [self.waiting.pushes.popleft() for _ in range(len(self.waiting.pushes))]:
                    self._file.write("pushed", pushed=pushed, servers=list(range(self.waiting.servers)))
            self._write_rows(rows)

    def _write_rest(self) -> None:
        """Write the laps that belong to no complete row: an interrupted step, or the time after the last step."""
        if self._sums and self._last is not None:
            us = {name: _us(seconds) for name, seconds in self._sums.items()}
            self._file.write("rest", since=round(self._last[0], 6), us=us)
            self._sums = {}

    def _write_rows(self, rows: list[tuple[int, float, int, dict[str, float]]]) -> None:
        if not rows:
            return
        steps, ends, samples, spans = zip(*rows, strict=True)
        columns = {name: [_us(row.get(name, 0.0)) for row in spans] for name in sorted(set().union(*spans))}
        self._file.write(
            "steps", steps=steps, each=self._stride, since=ends[0], ends_us=[_us(end - ends[0]) for end in ends],
            samples=samples, us=columns,
        )  # fmt: skip
        self._step = steps[-1]
        self._doublings += self._interval_s > 1.0 and len(rows) > _MANY
        self._stride = 2 ** (self._doublings + self._file.size // _DOUBLING_BYTES)

    def _new_laps(self) -> list[tuple[Any, ...]]:
        laps = []
        with contextlib.suppress(IndexError):
            while True:  # the training thread may append concurrently
                laps.append(self._laps.popleft())
        return laps

    def _process_lap(self, lap: tuple[Any, ...], rows: list[Any], raw: list[Any]) -> None:
        span, wanted, now, waited, joined, pushed, *rest = lap
        before, self._last = self._last, (now, waited, joined, pushed)
        if before is None or span is None:
            self._sums, self._samples, self._steps = {}, 0, 0
            self._traced = False
            return
        waits, joins = max(0.0, waited - before[1]), joined - before[2]  # counters may have been reset to 0
        pushes = max(0.0, pushed - before[3])
        sums, busy = self._sums, now - before[0] - waits - joins - pushes
        kind = Span.PULL if self.waiting.waits_for_servers else Span.WAIT
        for name, seconds in ((span, busy), (kind, waits), (Span.WAIT, joins), (Span.PUSH, pushes)):
            if seconds > 0.0:
                sums[name] = sums.get(name, 0.0) + seconds
        if wanted:
            if not self._traced:  # the start of this lap was not written yet
                raw.append((None, round(before[0], 6), 0.0))
            raw.append((str(span), round(now, 6), round(waits + joins + pushes, 6)))
        self._traced = wanted
        if rest:
            step, samples = rest
            self._samples += samples
            self._steps += 1
            if self._steps >= self._stride:
                rows.append((step, now, self._samples, sums))
                self._all = {name: self._all.get(name, 0.0) + sums.get(name, 0.0) for name in self._all.keys() | sums}
                self._all_steps += self._steps
                self._sums, self._samples, self._steps = {}, 0, 0

    def _write_heartbeat(self) -> None:
        """Write a heartbeat with the resources that this process uses."""
        now, cpu = _clock(), _cpu_s()
        cores = (cpu - self._cpu[1]) / max(1e-9, now - self._cpu[0])
        self._cpu = (now, cpu)
        record: dict[str, Any] = {"step": self._step, "memory_mib": round(_memory_mib(), 1)}
        record["cpu_cores"] = round(cores, 2)
        if self._device.type == "cuda":
            record["device_mib"] = round(torch.cuda.memory_allocated(self._device) / 2**20, 1)
        if self._last is not None and now - self._last[0] > _STUCK_S:
            record |= {"still_s": round(now - self._last[0], 1), "where": heartbeat.where(), "waits": heartbeat.waits()}
        self._file.write("now", **record)


def open_recorder(
    run_dir: Path, world: World, waiting: Waiting, logs: LogSettings | None, **attributes: Any
) -> Recorder:  # fmt: skip
    """Create this rank's recorder and write its start record. Collective, because it compares the machines' clocks.

    Args:
        run_dir: the run's folder.
        world: the rank's world; the rank of a newcomer is not assigned yet.
        waiting: counters of the rank's waiting time.
        logs: log settings of the launching process; None if that is this process.
        **attributes: plain data about the rank for the start record.
    """
    offset, uncertain = _clock_offset(world)  # first, so that a rank whose disk is full takes part
    file = EventFile(run_dir, f"worker {membership().worker or world.rank}", None if world.newcomer else world.rank)
    file.write(
        "start", size=world.size, generation=world.generation, host=socket.gethostname(), pid=os.getpid(),
        clock_offset_s=offset, clock_uncertain_s=uncertain, **attributes,
    )  # fmt: skip
    number = world.local_rank if world.newcomer else world.rank
    return Recorder(file, waiting, world.device, logging_to(file, number, logs), world.size)


def _clock_offset(world: World, rounds: int = 5) -> tuple[float, float]:
    """Return the lead of this machine's clock over the main rank's, and its uncertainty, in seconds.

    All ranks return from a barrier at about the same moment; the shortest round is the most accurate.
    """
    if world.newcomer or world.local_size == world.size:
        return 0.0, 0.0
    measurements = []
    for _ in range(rounds):
        began = time.monotonic()
        world.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=world.device)
        clocks = world.all_gather(now)
        measurements.append((time.monotonic() - began, float(now) - float(clocks[0])))
    seconds, offset = min(measurements)
    return round(offset, 6), round(seconds, 6)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_mib() -> float:
    """Return the resident memory of this process in MiB; its peak on systems without `/proc`."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
