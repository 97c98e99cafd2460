"""Records where a rank's time goes: the training thread takes laps, another thread writes them."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch

from fabricx.distributed import heartbeat
from fabricx.distributed.generations import membership
from fabricx.distributed.world import WAITED_S, World
from fabricx.telemetry.events import EventFile, finite
from fabricx.telemetry.logs import LogSettings, logging_to

_EVERY_S: Final = 1.0  # between two looks at what was recorded
_STILL_S: Final = 5.0  # without a lap, after which the line is told that the training thread is at
_FULL: Final = 2**26  # bytes of a file; the next as many hold twice as many steps, each row one more of them
_clock = time.monotonic


class Span(StrEnum):
    """What a rank does with its time. Waiting for others is counted apart from the span in which it waits."""

    DATA = "data"
    TRANSFER = "transfer"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    OPTIMIZER = "optimizer"
    PUSH = "push"
    PULL = "pull"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    OTHER = "other"


class Waiting(Protocol):
    """Whoever counts how long a rank has waited for others."""

    servers: int
    waited_s: float
    pushed_s: float
    waits_for_servers: bool

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        """Return the newest gradients that went to servers: by which worker, which of its, and when."""
        ...


class _Never:
    servers = 0
    waited_s = pushed_s = 0.0
    waits_for_servers = False
    pushes: deque[tuple[int, int, float]] = deque(maxlen=0)  # noqa: RUF012  # nothing is ever in it


class NoopRecorder:
    """Records nothing.

    Attributes:
        on: is anything recorded?
        samples: of this rank, since the last weight update.
        every_lap: write down each lap, and not only what they sum to by step.
    """

    on = False
    samples = 0
    waiting: Waiting = _Never()
    every_lap = False
    around = Span.OTHER  # what the time goes into unless something else is said

    def begin(self) -> None:
        """Let the time count from now on."""

    def lap(self, span: Span) -> None:
        """Say what the time since the last lap went into."""

    @contextlib.contextmanager
    def within(self, span: Span) -> Iterator[None]:
        """Let the time inside go into a span."""
        outer, self.around = self.around, span
        self.lap(outer)
        try:
            yield
        finally:
            self.lap(span)
            self.around = outer

    def end_step(self, step: int) -> None:
        """Say that a weight update is done with all that follows; `samples` are those of this rank in it."""
        self.samples = 0

    def event(self, name: str, text: str, step: int, **numbers: float) -> None:
        """Note that something has happened."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Note what the module has logged."""

    def gauges(self, values: Mapping[str, float], step: int) -> None:
        """Note what was measured of the training."""

    def rewind(self, step: int) -> None:
        """Note that the run goes on from a step, and had come further."""

    def became(self, rank: int, size: int, generation: int) -> None:
        """Note which rank of how many this process is from now on."""

    def knows(self, **fields: Any) -> None:
        """Note what has turned out about this rank."""

    def totals(self) -> tuple[dict[str, float], int]:
        """Return the seconds that went into each span so far, and in how many steps."""
        return {}, 0

    def close(self, ending: str) -> None:
        """Write what is left."""


@final
class Results(NoopRecorder):
    """Writes down what an evaluation after a run has given, beside that run's records."""

    def __init__(self, run_dir: Path) -> None:
        self._file = EventFile(run_dir, "results")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._file.write("metrics", step=step, values=finite(values))

    def close(self, ending: str) -> None:
        self._file.close()


@final
class Recorder(NoopRecorder):
    """Writes a rank's records. A lap costs the training thread one tuple; all else is done once a second by another.

    Args:
        file: where to.
        waiting: who counts how long the rank waits for others.
        device: of the rank.
        logs: while this is open, what is logged goes to the file too.
    """

    on = True

    def __init__(
        self, file: EventFile, waiting: Waiting, device: torch.device,
        logs: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:  # fmt: skip
        self._logs = contextlib.ExitStack()
        if logs is not None:
            self._logs.enter_context(logs)
        self._file, self.waiting, self._device = file, waiting, device
        self.samples = 0
        self._laps: deque[tuple[Any, ...]] = deque()
        self._last: tuple[float, float, float, float] | None = None  # where the newest lap ended
        self._sums: dict[str, float] = {}  # of the row that isn't complete
        self._samples = self._steps = 0  # the same
        self._stride = 1  # steps of a row
        self._traced = False  # was the newest lap written down?
        self._all: dict[str, float] = {}  # of all rows
        self._all_steps = 0
        self._step = 0
        self._cpu = (_clock(), _cpu_s())
        self._over = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._write_on, name="fabricx-telemetry", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._laps.append((None, self.every_lap, _clock(), self.waiting.waited_s, WAITED_S[0], self.waiting.pushed_s))

    def lap(self, span: Span) -> None:
        waiting = self.waiting
        self._laps.append((span, self.every_lap, _clock(), waiting.waited_s, WAITED_S[0], waiting.pushed_s))

    def end_step(self, step: int) -> None:
        waiting = self.waiting
        now = (_clock(), waiting.waited_s, WAITED_S[0], waiting.pushed_s)
        self._laps.append((Span.OTHER, self.every_lap, *now, step, self.samples))
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
        self._write()  # what was recorded so far is of the rank before
        self._file.rank = rank
        self._file.write("became", size=size, generation=generation)

    def knows(self, **fields: Any) -> None:
        self._file.write("known", **fields)

    def totals(self) -> tuple[dict[str, float], int]:
        self._write()
        return dict(self._all), self._all_steps

    def close(self, ending: str) -> None:
        self._over.set()
        self._thread.join()
        self._logs.close()
        self._write()
        self._file.write("end", ending=ending, step=self._step)
        self._file.close()

    # -- in the thread that writes ------------------------------------------------------------------------------

    def _write_on(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._write()
            self._tell_now()

    def _write(self) -> None:
        """Write down the laps since the last time: a column for each span, a row for each step."""
        with self._busy:
            rows: list[tuple[int, float, int, dict[str, float]]] = []
            raw: list[tuple[str | None, float, float]] = []
            for lap in self._taken():
                self._take(lap, rows, raw)
            if raw:
                self._file.write("laps", laps=raw)
                if pushed := [self.waiting.pushes.popleft() for _ in range(len(self.waiting.pushes))]:
                    self._file.write("pushed", pushed=pushed, servers=list(range(self.waiting.servers)))
            if rows:
                self._write_rows(rows)

    def _write_rows(self, rows: list[tuple[int, float, int, dict[str, float]]]) -> None:
        steps, ends, samples, spans = zip(*rows, strict=True)
        columns = {name: [_us(one.get(name, 0.0)) for one in spans] for name in sorted(set().union(*spans))}
        self._file.write(
            "steps", steps=steps, each=self._stride, since=ends[0], ends_us=[_us(end - ends[0]) for end in ends],
            samples=samples, us=columns,
        )  # fmt: skip
        self._step = steps[-1]
        self._stride = 2 ** (self._file.size // _FULL)

    def _taken(self) -> list[tuple[Any, ...]]:
        taken = []
        with contextlib.suppress(IndexError):
            while True:  # the training thread may add meanwhile
                taken.append(self._laps.popleft())
        return taken

    def _take(self, lap: tuple[Any, ...], rows: list[Any], raw: list[Any]) -> None:
        span, wanted, now, waited, joined, pushed, *rest = lap
        before, self._last = self._last, (now, waited, joined, pushed)
        if before is None or span is None:
            self._sums, self._samples, self._steps = {}, 0, 0
            self._traced = False
            return
        waits, joins = max(0.0, waited - before[1]), joined - before[2]  # who counts them may begin anew
        pushes = max(0.0, pushed - before[3])
        sums, own = self._sums, now - before[0] - waits - joins - pushes
        kind = Span.PULL if self.waiting.waits_for_servers else Span.WAIT
        for name, seconds in ((span, own), (kind, waits), (Span.WAIT, joins), (Span.PUSH, pushes)):
            if seconds > 0.0:
                sums[name] = sums.get(name, 0.0) + seconds
        if wanted:
            if not self._traced:  # so far nobody wanted to know where this one began
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

    def _tell_now(self) -> None:
        """Say that this process lives, and what it takes."""
        now, cpu = _clock(), _cpu_s()
        cores = (cpu - self._cpu[1]) / max(1e-9, now - self._cpu[0])
        self._cpu = (now, cpu)
        found: dict[str, Any] = {"step": self._step, "memory_mib": round(_memory_mib(), 1)}
        found["cpu_cores"] = round(cores, 2)
        if self._device.type == "cuda":
            found["device_mib"] = round(torch.cuda.memory_allocated(self._device) / 2**20, 1)
        if self._last is not None and now - self._last[0] > _STILL_S:
            found |= {"still_s": round(now - self._last[0], 1), "where": heartbeat.where(), "waits": heartbeat.waits()}
        self._file.write("now", **found)


def open_recorder(
    run_dir: Path, world: World, waiting: Waiting, logs: LogSettings | None, **known: Any
) -> Recorder:  # fmt: skip
    """Return what records on this rank, begun with what is known of it.

    Args:
        run_dir: the run's folder.
        world: with this rank in it; a newcomer's isn't known yet.
        waiting: who counts how long it waits for others.
        logs: how the launching process logs, if that isn't this one.
        known: plain data.
    """
    offset, uncertain = _clock_offset(world)  # all ranks take part, also one that has no room for a file
    file = EventFile(run_dir, f"worker {membership().worker or world.rank}", None if world.newcomer else world.rank)
    file.write(
        "start", size=world.size, generation=world.generation, host=socket.gethostname(), pid=os.getpid(),
        clock_offset_s=offset, clock_uncertain_s=uncertain, **known,
    )  # fmt: skip
    number = world.local_rank if world.newcomer else world.rank
    return Recorder(file, waiting, world.device, logging_to(file, number, logs))


def _clock_offset(world: World, rounds: int = 5) -> tuple[float, float]:
    """Return by how much this machine's clock is ahead of the main rank's, in seconds, and how uncertain that is.

    All ranks leave a barrier at about the same moment; the round that takes least is the one that says most.
    """
    if world.newcomer or world.local_size == world.size:
        return 0.0, 0.0
    found = []
    for _ in range(rounds):
        began = time.monotonic()
        world.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=world.device)
        clocks = world.all_gather(now)
        found.append((time.monotonic() - began, float(now) - float(clocks[0])))
    seconds, offset = min(found)
    return round(offset, 6), round(seconds, 6)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_mib() -> float:
    """Return the main memory that this process takes, in MiB; where the system doesn't say, the most that it took."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
