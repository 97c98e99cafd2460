"""State of a run, built incrementally from the records of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from fabricx.telemetry.events import Span
from fabricx.telemetry.reader import Record
from fabricx.telemetry.timeline import NoHistory

WARM_UP: Final = 2  # first steps of each process, which are not representative and are ignored
MAX_ROWS: Final = 2048  # most rows of a rank; beyond that, pairs of rows are merged
MAX_LOGS: Final = 100_000  # most log lines in memory
NOT_OF_A_STEP: Final = (Span.VALIDATION, Span.CHECKPOINT)
WAITING: Final = (Span.WAIT, Span.PULL)  # spans in which a rank waits for other processes


@dataclass(slots=True)
class Row:
    """Consecutive steps of a rank, merged.

    Attributes:
        step: number of the last step.
        at: end of the last step, seconds since 1970.
        steps: number of steps.
        samples: samples in these steps.
        seconds: time by span.
    """

    step: int
    at: float
    steps: int
    samples: int
    seconds: dict[str, float]

    def add(self, other: Row) -> None:
        """Merge the steps that follow into this row.

        Args:
            other: the row with these steps.
        """
        self.step, self.at = other.step, other.at
        self.steps += other.steps
        self.samples += other.samples
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def step_s(self) -> float:
        """Return the mean duration of a step in seconds, without validations and checkpoints."""
        return sum(s for name, s in self.seconds.items() if name not in NOT_OF_A_STEP) / max(1, self.steps)

    @property
    def busy_s(self) -> float:
        """Return the mean seconds of a step that the rank spends without waiting for other processes."""
        return self.step_s - self.mean(*WAITING)

    def mean(self, *spans: str) -> float:
        """Return the mean seconds per step in some spans.

        Args:
            *spans: names of spans; their times are added.
        """
        return sum(self.seconds.get(span, 0.0) for span in spans) / max(1, self.steps)


def joined(rows: Iterable[Row]) -> Row:
    """Merge rows.

    Args:
        rows: rows of a rank, in the order of steps.
    """
    merged = Row(0, 0.0, 0, 0, {})
    for row in rows:
        merged.add(row)
    return merged


@dataclass
class Rank:
    """State of a rank, across all processes that held the rank.

    Attributes:
        rank: the rank.
        attributes: start record of its newest process, updated by later records.
        rows: its steps.
        now: newest heartbeat record.
        step: newest step.
        heard: time of its newest record, seconds since 1970.
        ending: how its newest process ended; None if it is running or was killed.
        processes: number of processes that held the rank.
        most_mib: peak of its main memory, in MiB.
    """

    rank: int
    attributes: Record = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    now: Record = field(default_factory=dict)
    step: int = 0
    heard: float = 0.0
    ending: str | None = None
    processes: int = 0
    most_mib: float = 0.0
    _stride: int = 1  # steps per row of new rows
    _skip: int = 0

    def begin(self, record: Record) -> None:
        """Register a new process of this rank.

        Args:
            record: its start record.
        """
        self.attributes, self.ending, self._skip = {**self.attributes, **record}, None, WARM_UP
        self.processes += 1

    def add(self, row: Row) -> None:
        """Add steps.

        Args:
            row: the steps; the first rows of each process are ignored.
        """
        self.step = row.step
        if self._skip:
            self._skip -= 1
            return
        if self.rows and self.rows[-1].steps < self._stride:
            self.rows[-1].add(row)
        else:
            self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self._stride *= 2
            pairs = zip(self.rows[::2], self.rows[1::2], strict=False)
            odd = self.rows[-1:] if len(self.rows) % 2 else []
            self.rows = [joined(pair) for pair in pairs] + odd


@final
class Run:
    """State of a run, built from its records.

    Attributes:
        id: id of the run.
        ranks: ranks by number.
        metrics: logged metrics: by name, value by step.
        gauges: measurements of the training: by name, value by step.
        events: event records, in order.
        logs: records of Python's logs, in order.
        began: time of the first record, seconds since 1970.
        ended: time of the newest record, seconds since 1970.
        size: present world size.
        steps: newest step of the fastest rank.
        rewound: number of rollbacks to an earlier step.
        more_logs: number of log lines beyond `MAX_LOGS`.
        lost: number of records that were dropped because of a full disk.
        malformed: number of records with invalid fields.
        closed: how the launching process ended; "" if it has not.

    Args:
        history: receives the activity and the resources of each rank.
    """

    def __init__(self, history: NoHistory | None = None) -> None:
        self.id = ""
        self._history = history or NoHistory()
        self.ranks: dict[int, Rank] = {}
        self.metrics: dict[str, dict[int, float]] = {}
        self.gauges: dict[str, dict[int, float]] = {}
        self.events: list[Record] = []
        self.logs: list[Record] = []
        self.began = self.ended = 0.0
        self.size = 1
        self.steps = self.rewound = 0
        self.more_logs = 0
        self.lost = 0
        self.malformed = 0
        self.closed = ""
        self._offsets: dict[str, float] = {}  # by file: lead of its clock over the main rank's, in seconds
        self._monos: dict[str, float] = {}  # by file: wall time at which its monotonic clock was 0
        self._starts: dict[str, Record] = {}  # by file: start record of its process
        self._handlers: Mapping[str, Any] = {
            "start": self._start, "became": self._start, "steps": self._steps, "now": self._now, "end": self._end,
            "rest": self._rest,
            "metrics": self._metrics, "gauges": self._gauges, "rewind": self._rewind, "lost": self._lose,
            "event": self._event, "log": self._log,
            "serving": self._serving, "known": self._known, "launched": self._launched, "closed": self._close,
        }  # fmt: skip

    def feed(self, records: Iterable[Record]) -> None:
        """Update the state.

        Args:
            records: new records; records of the same file must be in order.
        """
        for record in records:
            name = record["file"]
            self.id = record.get("run", self.id)
            if record["kind"] == "start":
                self._offsets[name] = record.get("clock_offset_s", 0.0)
            record["at"] = float(record.get("at", 0.0)) - self._offsets.get(name, 0.0)
            self.began = min(self.began, record["at"]) if self._monos else record["at"]
            self._monos.setdefault(name, record["at"] - float(record.get("mono", 0.0)))
            self.ended = max(self.ended, record["at"])
            if record.get("rank") is not None:
                self._rank(record).heard = record["at"]
            handle = self._handlers.get(record["kind"])
            try:
                if handle is not None:
                    handle(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # not written by fabricx
                self.malformed += 1

    @property
    def synchronous(self) -> bool:
        """Return whether the strategy is synchronous: each rank waits for all ranks."""
        return all(rank.attributes.get("synchronous", True) for rank in self.ranks.values())

    @property
    def present(self) -> list[Rank]:
        """Return the ranks of the present world, or of the last if the run ended."""
        return [rank for number, rank in sorted(self.ranks.items()) if number < self.size]

    def wall(self, record: Record, mono: float) -> float:
        """Convert a time of a process's monotonic clock.

        Args:
            record: any record of that process.
            mono: seconds on its monotonic clock.

        Returns:
            seconds since 1970 on the main rank's clock.
        """
        return self._monos[record["file"]] + mono

    def _rank(self, record: Record) -> Rank:
        number = record["rank"]
        return self.ranks.setdefault(number, Rank(number))

    def _start(self, record: Record) -> None:
        _check_numbers(record, "loader_processes", "cores")
        self.closed = ""
        start = self._starts[record["file"]] = {"began": record["at"], **self._starts.get(record["file"], {}), **record}
        if record.get("rank") is None:  # a newcomer has no rank before it joins the group
            return
        self.size, rank = record.get("size", self.size), self._rank(record)
        fresh = rank.attributes.get("file") != record["file"]
        if fresh:
            rank.begin(start)
        else:  # the group changed, the process of this rank did not
            rank.attributes |= record
        at = start["began"] if fresh else record["at"]
        self._history.change(rank.rank, at, fresh=fresh, began=self.began)

    def _known(self, record: Record) -> None:
        if "rank" in record:
            _check_numbers(record, "loader_processes", "cores")
            self._rank(record).attributes.update(record)

    def _steps(self, record: Record) -> None:
        if "rank" not in record:
            return
        rank, stride, names = self._rank(record), record["each"], list(record["us"])
        columns = [record["us"][name] for name in names]
        for step, end, samples, *parts in zip(
            record["steps"], record["ends_us"], record["samples"], *columns, strict=False
        ):
            seconds = {name: us / 1e6 for name, us in zip(names, parts, strict=True) if us}
            at = self.wall(record, record["since"] + end / 1e6)
            rank.add(Row(int(step), at, stride, int(samples), seconds))
            self._history.spend(rank.rank, rank.step, at, seconds)
        self.steps = max(self.steps, rank.step)

    def _rest(self, record: Record) -> None:
        """Account for the time after the last complete step."""
        if "rank" in record:
            rank = self._rank(record)
            seconds = {name: us / 1e6 for name, us in record["us"].items()}
            self._history.spend(rank.rank, rank.step, self.wall(record, record["since"]), seconds)

    def _now(self, record: Record) -> None:
        if "rank" in record:
            _check_numbers(record, "memory_mib", "device_mib", "cpu_cores", "still_s")
            rank = self._rank(record)
            rank.now = record
            rank.most_mib = max(rank.most_mib, record.get("memory_mib", 0.0))
            self._history.measure(rank.rank, record["at"], record, self.began)

    def _end(self, record: Record) -> None:
        if "rank" in record:
            _check_numbers(record, "memory_mib")
            rank = self._rank(record)
            rank.ending = record["ending"]
            rank.most_mib = max(rank.most_mib, record.get("memory_mib", 0.0))
            self._history.end(record["rank"], record["at"])

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
        """Delete the metrics of the steps that a rollback discards."""
        self.rewound += 1
        for values in (*self.metrics.values(), *self.gauges.values()):
            for step in [step for step in values if step > record["step"]]:
                del values[step]

    def _event(self, record: Record) -> None:
        _check_text(record, "name", "text")
        _check_numbers(record, "seconds", "steps_again")
        if "rank" not in record and "step" in record:  # the launching process reads the steps of ranks every 2 s
            record["step"] = max(record["step"], self.steps)
        self.events.append(record)

    def _log(self, record: Record) -> None:
        _check_text(record, "level", "name", "text")
        if len(self.logs) < MAX_LOGS:
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
        raise TypeError(f"{record['kind']}: {', '.join(names)} must be numbers")


def _check_text(record: Record, *names: str) -> None:
    if not all(isinstance(record[name], str) for name in names):
        raise TypeError(f"{record['kind']}: {', '.join(names)} must be text")
