"""Activity of each rank over the time of a run: bins of bounded number whose seconds add up to the wall-clock time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from fabricx.telemetry.events import Span

# What a rank does outside of the spans of its recorder:
START: Final = "start-up"  # from the launch to the first batch
RECOVERY: Final = "recovery"  # after a failure, until the next batch
DOWN: Final = "down"  # no process
AFTER: Final = "after training"  # from the last batch to the end of the run
UNMEASURED: Final = "unmeasured"  # without records
OUTSIDE: Final = (START, RECOVERY, DOWN, AFTER, UNMEASURED)

MAX_BINS: Final = 512  # most bins; beyond that, pairs of bins are merged
_MAX_STEPS: Final = 200  # most steps of validations in memory
_ROUNDING_S: Final = 0.002  # a shorter gap between two rows is rounding
# Spans of a step in the order of time. A validation or a checkpoint precedes the step in whose row it is recorded.
_ORDER: Final = {
    str(span): number
    for number, span in enumerate((
        Span.VALIDATION, Span.CHECKPOINT, Span.DATA, Span.TRANSFER, Span.PULL, Span.FORWARD, Span.BACKWARD, Span.WAIT,
        Span.OPTIMIZER, Span.PUSH, Span.OTHER,
    ))
}  # fmt: skip


@final
class TimeBins:
    """Values by name in bins of equal width. The width doubles when a run outgrows `MAX_BINS` bins.

    Attributes:
        began: start of the first bin, seconds since 1970.
        width: width of a bin, seconds.
        bins: values by name of each bin.

    Args:
        began: start of the first bin, seconds since 1970.
        combine: merges two values of a name in a bin.
    """

    def __init__(self, began: float, combine: Callable[[float, float], float]) -> None:
        self.began, self.width, self._combine = began, 2.0**-7, combine
        self.bins: list[dict[str, float]] = []

    def put(self, at: float, name: str, value: float) -> None:
        """Add a value.

        Args:
            at: time, seconds since 1970.
            name: name of the value.
            value: the value.
        """
        self._merge(self._bin(at), name, value)

    def spread(self, begin: float, end: float, name: str) -> None:
        """Add the seconds of an interval to the bins that it touches.

        Args:
            begin: start of the interval, seconds since 1970.
            end: its end.
            name: name of the activity.
        """
        self._bin(end)
        first = max(0, int((begin - self.began) / self.width))
        for index in range(first, int((end - self.began) / self.width) + 1):
            left = self.began + index * self.width
            seconds = min(end, left + self.width) - max(begin, left)
            if seconds > 0.0:
                self._merge(self.bins[index], name, seconds)

    def _bin(self, at: float) -> dict[str, float]:
        while (index := max(0, int((at - self.began) / self.width))) >= MAX_BINS:
            pairs = [self.bins[number : number + 2] for number in range(0, len(self.bins), 2)]
            self.bins = []
            for first, *rest in pairs:
                for second in rest:
                    for name, value in second.items():
                        self._merge(first, name, value)
                self.bins.append(first)
            self.width *= 2.0
        self.bins.extend({} for _ in range(index + 1 - len(self.bins)))
        return self.bins[index]

    def _merge(self, values: dict[str, float], name: str, value: float) -> None:
        values[name] = self._combine(values[name], value) if name in values else value


@final
class Timeline:
    """Activity of a rank, across all processes that held the rank. Each moment belongs to exactly one activity.

    Attributes:
        activity: seconds by activity of each bin of time: a span of the recorder, or one of `OUTSIDE`.
        until: end of the time that is accounted for, seconds since 1970.

    Args:
        began: start of the run, seconds since 1970.
    """

    def __init__(self, began: float) -> None:
        self.activity = TimeBins(began, operator.add)
        self.until = began
        self._changes: list[tuple[float, bool]] = []  # (time, new process?) since `until`
        self._processes = 0

    def change(self, at: float, *, fresh: bool) -> None:
        """Register a new process of the rank, or that its process group changed.

        Args:
            at: start of the process, or time of the change.
            fresh: whether the process is new.
        """
        self._changes.append((at, fresh))

    def spend(self, end: float, seconds: Mapping[str, float]) -> None:
        """Account for a row of the recorder, and for the gap before it.

        Args:
            end: end of the row, seconds since 1970.
            seconds: seconds by span.
        """
        total = sum(seconds.values())
        if end <= self.until or total <= 0.0:
            return
        begin = max(self.until, end - total)
        if begin - self.until > _ROUNDING_S:
            self._fill(begin)
        scale = (end - self.until) / total  # 1, apart from rounding and clocks that were set
        bins, at = self.activity, self.until
        if end < bins.began + len(bins.bins) * bins.width and int((at - bins.began) / bins.width) == len(bins.bins) - 1:
            newest = bins.bins[-1]  # most rows of a long run fit into the newest bin
            for name, spent in seconds.items():
                newest[name] = newest.get(name, 0.0) + spent * scale
        else:
            for name in sorted(seconds, key=lambda name: _ORDER.get(name, len(_ORDER))):
                bins.spread(at, at + seconds[name] * scale, name)
                at += seconds[name] * scale
        self.until = end

    def close(self, at: float, activity: str) -> None:
        """Account for the time since the newest row.

        Args:
            at: seconds since 1970.
            activity: one of `OUTSIDE`.
        """
        if activity == AFTER and not self.activity.bins:  # it ended before the first batch
            activity = START
        if at > self.until:
            self.activity.spread(self.until, at, activity)
            self.until = at

    def totals(self) -> dict[str, float]:
        """Return seconds by activity."""
        totals: dict[str, float] = {}
        for values in self.activity.bins:
            for name, seconds in values.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def _fill(self, end: float) -> None:
        """Account for a gap between rows, which changes of the process divide."""
        begun = self._processes > 0
        for at, fresh in self._changes:
            self.close(min(max(at, self.until), end), (DOWN if fresh else RECOVERY) if begun else START)
            self._processes += fresh
        self.close(end, START if not begun else RECOVERY if self._changes else UNMEASURED)
        self._changes.clear()


class NoHistory:
    """A history that keeps nothing: during training nothing reads it."""

    def change(self, rank: int, at: float, *, fresh: bool, began: float) -> None:
        """Register a new process of a rank, or a change of the process group.

        Args:
            rank: the rank.
            at: time of the change, seconds since 1970.
            fresh: whether the process is new.
            began: start of the run.
        """

    def spend(self, rank: int, step: int, end: float, seconds: Mapping[str, float]) -> None:
        """Register a row of a rank's recorder.

        Args:
            rank: the rank.
            step: newest step of the row.
            end: end of the row, seconds since 1970.
            seconds: seconds by span.
        """

    def measure(self, rank: int, at: float, values: Mapping[str, Any], began: float) -> None:
        """Register the resources that a rank uses.

        Args:
            rank: the rank.
            at: seconds since 1970.
            values: fields of a heartbeat record.
            began: start of the run.
        """

    def end(self, rank: int, at: float) -> None:
        """Register that a rank's process ended.

        Args:
            rank: the rank.
            at: seconds since 1970.
        """


@final
class History(NoHistory):
    """Timelines and resources of all ranks, for reports.

    Attributes:
        timelines: timelines by rank.
        resources: peaks of `memory_mib`, `device_mib`, `cpu_cores` in bins of time, by rank.
        validations: newest steps before validations.
    """

    def __init__(self) -> None:
        self.timelines: dict[int, Timeline] = {}
        self.resources: dict[int, TimeBins] = {}
        self.validations: list[int] = []
        self._every = 1  # every n-th validation is kept
        self._seen = 0

    def change(self, rank: int, at: float, *, fresh: bool, began: float) -> None:
        self.timelines.setdefault(rank, Timeline(began)).change(at, fresh=fresh)

    def spend(self, rank: int, step: int, end: float, seconds: Mapping[str, float]) -> None:
        if (timeline := self.timelines.get(rank)) is not None:
            timeline.spend(end, seconds)
        if rank == 0 and seconds.get(Span.VALIDATION):
            self._seen += 1
            if self._seen % self._every == 0:
                self.validations.append(step)
            if len(self.validations) > _MAX_STEPS:
                self.validations, self._every = self.validations[1::2], 2 * self._every

    def measure(self, rank: int, at: float, values: Mapping[str, Any], began: float) -> None:
        bins = self.resources.setdefault(rank, TimeBins(began, max))
        for name in ("memory_mib", "device_mib", "cpu_cores"):
            if name in values:
                bins.put(at, name, float(values[name]))

    def end(self, rank: int, at: float) -> None:
        if (timeline := self.timelines.get(rank)) is not None:
            timeline.close(at, AFTER)

    def close(self, ended: float, heard: Mapping[int, float], live: set[int], silent_s: float) -> None:
        """Account for the time up to the newest record of the run.

        Args:
            ended: time of that record, seconds since 1970.
            heard: time of the newest record by rank.
            live: ranks whose process has not recorded its end.
            silent_s: a live process without records for this time was killed.
        """
        for rank, timeline in self.timelines.items():
            killed = rank in live and ended - heard[rank] > silent_s
            timeline.close(min(heard[rank], ended), UNMEASURED)
            timeline.close(ended, DOWN if killed else UNMEASURED if rank in live else AFTER)
