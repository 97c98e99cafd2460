"""The state of a run, joined from the records of its processes as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from fabricx.telemetry.reader import Record
from fabricx.telemetry.recorder import Span

WARM_UP: Final = 2  # steps of each process that say nothing of those to come
ROWS: Final = 2048  # the most that are kept of a rank; then each two become one
LOGS: Final = 100_000  # the most lines of logs that are kept
NOT_OF_A_STEP: Final = (Span.VALIDATION, Span.CHECKPOINT)
OTHERS: Final = (Span.WAIT, Span.PULL)  # in which a rank waits for others


@dataclass(slots=True)
class Row:
    """Some steps of one rank: where they end, how many they are, and where their time went.

    Attributes:
        step: the last of them.
        at: when it ended, in seconds since 1970.
        steps, samples: how many.
        seconds: by span.
    """

    step: int
    at: float
    steps: int
    samples: int
    seconds: dict[str, float]

    def add(self, other: Row) -> None:
        """Take in the steps that come next."""
        self.step, self.at = other.step, other.at
        self.steps += other.steps
        self.samples += other.samples
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def step_s(self) -> float:
        """Return the mean time of a step, without validations and checkpoints."""
        return sum(s for name, s in self.seconds.items() if name not in NOT_OF_A_STEP) / max(1, self.steps)

    @property
    def busy_s(self) -> float:
        """Return the mean time that the rank itself takes for a step, without waiting for others."""
        return self.step_s - self.mean(*OTHERS)

    def mean(self, *spans: str) -> float:
        """Return the mean time of some spans in a step."""
        return sum(self.seconds.get(span, 0.0) for span in spans) / max(1, self.steps)


def joined(rows: Iterable[Row]) -> Row:
    """Return all steps as one row."""
    found = Row(0, 0.0, 0, 0, {})
    for row in rows:
        found.add(row)
    return found


@dataclass
class Rank:
    """What is known of one rank, whichever processes it had.

    Attributes:
        rank: its number.
        known: what its newest process has said of itself at its start.
        rows: its steps.
        now: the newest sign of life.
        step, heard: its newest step, and when something was heard of it last.
        ending: how its newest process ended; None if it hasn't, or was killed.
        processes: how many there were.
        most_mib: the most main memory that was seen.
    """

    rank: int
    known: Record = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    now: Record = field(default_factory=dict)
    step: int = 0
    heard: float = 0.0
    ending: str | None = None
    processes: int = 0
    most_mib: float = 0.0
    _stride: int = 1  # rows that become one
    _skip: int = 0

    def begin(self, record: Record) -> None:
        """Note that a process is this rank from now on."""
        self.known, self.ending, self._skip = {**self.known, **record}, None, WARM_UP
        self.processes += 1

    def add(self, row: Row) -> None:
        """Take in steps."""
        self.step = row.step
        if self._skip:
            self._skip -= 1
            return
        if self.rows and self.rows[-1].steps < self._stride:
            self.rows[-1].add(row)
        else:
            self.rows.append(row)
        if len(self.rows) > ROWS:
            self._stride *= 2
            pairs = zip(self.rows[::2], self.rows[1::2], strict=False)
            odd = self.rows[-1:] if len(self.rows) % 2 else []
            self.rows = [joined(pair) for pair in pairs] + odd


@final
class Run:
    """A run as its records tell it.

    Attributes:
        ranks: by number.
        metrics, gauges: what was logged, and measured, by name: value by step.
        events: what has happened, in order.
        logs: what was written to Python's logs, in order.
        began, ended: seconds since 1970; of the first record, and of the newest.
        size: ranks at this moment.
        steps: done so far, by the furthest rank.
        rewound: how often it went on from an earlier step.
    """

    def __init__(self) -> None:
        self.id = ""
        self.ranks: dict[int, Rank] = {}
        self.metrics: dict[str, dict[int, float]] = {}
        self.gauges: dict[str, dict[int, float]] = {}
        self.events: list[Record] = []
        self.logs: list[Record] = []
        self.began = self.ended = 0.0
        self.size = 1
        self.steps = self.rewound = 0
        self.more_logs = 0  # lines beyond those that are kept
        self.lost = 0  # records for which there was no room
        self.malformed = 0  # records whose content isn't what their kind says
        self.closed = ""  # how the launching process has ended
        self._offsets: dict[str, float] = {}  # of each file's clock, from the main rank's
        self._monos: dict[str, float] = {}  # wall time where each file's monotonic clock is 0
        self._starts: dict[str, Record] = {}  # what each file's process has said of itself
        self._take: Mapping[str, Any] = {
            "start": self._start, "became": self._start, "steps": self._steps, "now": self._now, "end": self._end,
            "metrics": self._metrics, "gauges": self._gauges, "rewind": self._rewind, "lost": self._lose,
            "event": self._event, "log": self._log,
            "serving": self._serving, "known": self._known, "launched": self._launched, "closed": self._close,
        }  # fmt: skip

    def feed(self, records: Iterable[Record]) -> None:
        """Take in records, in any order that keeps each file's own."""
        for record in records:
            name = record["file"]
            self.id = record.get("run", self.id)
            if record["kind"] == "start":
                self._offsets[name] = record.get("clock_offset_s", 0.0)
            record["at"] = float(record.get("at", 0.0)) - self._offsets.get(name, 0.0)
            self._monos.setdefault(name, record["at"] - float(record.get("mono", 0.0)))
            self.began = min(self.began or record["at"], record["at"])
            self.ended = max(self.ended, record["at"])
            if record.get("rank") is not None:
                self._rank(record).heard = record["at"]
            take = self._take.get(record["kind"])
            try:
                if take is not None:
                    take(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # nothing of fabricx's own
                self.malformed += 1

    @property
    def synchronous(self) -> bool:
        """Return whether each rank waits for all others."""
        return all(rank.known.get("synchronous", True) for rank in self.ranks.values())

    @property
    def present(self) -> list[Rank]:
        """Return the ranks that there are at this moment, or were at the end."""
        return [rank for number, rank in sorted(self.ranks.items()) if number < self.size]

    def wall(self, record: Record, mono: float) -> float:
        """Return when something was, of which a record gives the time of its process's monotonic clock."""
        return self._monos[record["file"]] + mono

    def _rank(self, record: Record) -> Rank:
        number = record["rank"]
        return self.ranks.setdefault(number, Rank(number))

    def _start(self, record: Record) -> None:
        _check_numbers(record, "loader_processes", "cores")
        self.closed = ""
        known = self._starts[record["file"]] = {**self._starts.get(record["file"], {}), **record}
        if record.get("rank") is None:  # a newcomer has none before it has become one of the group
            return
        self.size, rank = record.get("size", self.size), self._rank(record)
        if rank.known.get("file") == record["file"]:  # the group has changed, and not who this rank is
            rank.known |= record
        else:
            rank.begin(known)

    def _known(self, record: Record) -> None:
        if "rank" in record:
            _check_numbers(record, "loader_processes", "cores")
            self._rank(record).known.update(record)

    def _steps(self, record: Record) -> None:
        if "rank" not in record:
            return
        rank, each, names = self._rank(record), record["each"], list(record["us"])
        columns = [record["us"][name] for name in names]
        for step, end, samples, *parts in zip(
            record["steps"], record["ends_us"], record["samples"], *columns, strict=False
        ):
            seconds = {name: us / 1e6 for name, us in zip(names, parts, strict=True) if us}
            at = self.wall(record, record["since"] + end / 1e6)
            rank.add(Row(int(step), at, each, int(samples), seconds))
        self.steps = max(self.steps, rank.step)

    def _now(self, record: Record) -> None:
        if "rank" in record:
            _check_numbers(record, "memory_mib", "device_mib", "cpu_cores", "still_s")
            rank = self._rank(record)
            rank.now = record
            rank.most_mib = max(rank.most_mib, record.get("memory_mib", 0.0))

    def _end(self, record: Record) -> None:
        if "rank" in record:
            self._rank(record).ending = record["ending"]

    def _metrics(self, record: Record) -> None:
        for name, value in record["values"].items():
            self.metrics.setdefault(name, {})[record["step"]] = float(value)

    def _gauges(self, record: Record) -> None:
        for name, value in record["values"].items():
            self.gauges.setdefault(name, {})[record["step"]] = float(value)

    def _serving(self, record: Record) -> None:
        number = record["who"].removeprefix("server")
        for name in ("queue", "staleness"):
            if name in record:
                self.gauges.setdefault(f"server_{name}_{number}", {})[self.steps] = record[name]

    def _rewind(self, record: Record) -> None:
        """Forget what a run has logged that goes on from an earlier step."""
        self.rewound += 1
        for values in (*self.metrics.values(), *self.gauges.values()):
            for step in [step for step in values if step > record["step"]]:
                del values[step]

    def _event(self, record: Record) -> None:
        _check_text(record, "name", "text")
        _check_numbers(record, "seconds", "steps_again")
        self.events.append(record)

    def _log(self, record: Record) -> None:
        _check_text(record, "level", "name", "text")
        if len(self.logs) < LOGS:
            self.logs.append(record)
        else:
            self.more_logs += 1

    def _lose(self, record: Record) -> None:
        self.lost += record["records"]

    def _launched(self, record: Record) -> None:
        self.closed = ""

    def _close(self, record: Record) -> None:
        self.closed = str(record["ending"])


def _check_numbers(record: Record, *names: str) -> None:
    if not all(isinstance(record.get(name, 0), (int, float)) for name in names):
        raise TypeError(f"{record['kind']}: {', '.join(names)} are numbers")


def _check_text(record: Record, *names: str) -> None:
    if not all(isinstance(record[name], str) for name in names):
        raise TypeError(f"{record['kind']}: {', '.join(names)} are text")
