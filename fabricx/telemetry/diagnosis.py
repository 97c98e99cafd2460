"""Find the bottleneck of a run: pure functions of each rank's times."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from fabricx.telemetry.events import Span
from fabricx.telemetry.run import NOT_OF_A_STEP, WAITING, Row, Run, joined

SPAN_LABELS: Final[Mapping[str, str]] = {
    Span.DATA: "data wait", Span.TRANSFER: "transfer", Span.FORWARD: "forward", Span.BACKWARD: "backward",
    Span.WAIT: "communication wait", Span.OPTIMIZER: "optimizer", Span.PUSH: "push", Span.PULL: "pull",
    Span.CHECKPOINT: "checkpoint", Span.VALIDATION: "validation", Span.OTHER: "callbacks and logging",
}  # fmt: skip
# Fractions of a step from which a cause is reported:
SLOW_RANK: Final = 0.10  # time that the other ranks wait for a slow rank
DATA_BOUND: Final = 0.10  # waiting for data
COMMUNICATION_BOUND: Final = 0.30  # waiting for communication on all ranks


def straggler_scores(rows: Sequence[Row]) -> list[float]:
    """Return for each rank the fraction of a step (0 to 1) to be saved if the rank were as fast as the median.

    Ranks are compared by busy time, because steps of a synchronous strategy have the same duration on all ranks.

    Args:
        rows: the times of each rank, in order of ranks.

    >>> slow, fast = Row(1, 0.0, 1, 8, {"forward": 0.009}), Row(1, 0.0, 1, 8, {"forward": 0.003, "wait": 0.006})
    >>> [round(score, 2) for score in straggler_scores([fast, slow])]
    [0.0, 0.67]
    """
    busy = [row.busy_s for row in rows]
    step = max((row.step_s for row in rows), default=0.0)
    if len(rows) < 2 or step <= 0.0:
        return [0.0] * len(rows)
    ordered = sorted(busy)
    return [min(1.0, max(0.0, (seconds - _median_without(ordered, seconds)) / step)) for seconds in busy]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted numbers without one of them."""
    position, middle = bisect_left(ordered, value), (len(ordered) - 2) // 2
    low, high = (ordered[index + (index >= position)] for index in (middle, (len(ordered) - 1) // 2))
    return (low + high) / 2


def diagnose(run: Run) -> str:
    """Return a sentence about the largest bottleneck of a run.

    Args:
        run: the run so far.
    """
    rows = {rank.rank: joined(rank.rows) for rank in run.present}
    attributes = next((rank.attributes for rank in run.present), {})
    return diagnose_rows(
        {rank: row for rank, row in rows.items() if row.steps}, synchronous=run.synchronous,
        loaders=attributes.get("loader_processes"), cores=attributes.get("cores"),
    )  # fmt: skip


def diagnose_rows(
    rows: Mapping[int, Row], *, synchronous: bool, loaders: int | None = None, cores: int | None = None
) -> str:  # fmt: skip
    """Return a sentence about the largest bottleneck.

    Args:
        rows: merged steps of each rank, by rank.
        synchronous: whether each rank waits for all ranks.
        loaders: data loader processes per rank; None if unknown.
        cores: processor cores per rank; None if unknown.

    >>> diagnose_rows({0: Row(9, 0.0, 9, 72, {"data": 0.0009, "forward": 0.09})}, synchronous=True)
    '99 % of each step of 10.1 ms is computing'
    """
    if not rows:
        return "no step is done yet, or too few for a diagnosis"
    ranks, all_rows = list(rows), list(rows.values())
    step = max(row.step_s for row in all_rows)
    if step <= 0.0:
        return "steps are too short to be measured"
    scores = straggler_scores(all_rows)
    worst = max(range(len(scores)), key=scores.__getitem__)
    if scores[worst] >= SLOW_RANK:
        return _slow(ranks[worst], all_rows, worst, scores[worst], synchronous=synchronous)
    data = max(row.mean(Span.DATA) for row in all_rows)
    if data >= DATA_BOUND * step:
        return (
            f"waiting for data takes {_ms(data)} ms of each step of {_ms(step)} ms, {_percent(data / step)}: "
            f"{_advice(loaders, cores)}"
        )
    wait = min(row.mean(*WAITING, Span.PUSH) for row in all_rows)
    if wait >= COMMUNICATION_BOUND * step:
        return f"no rank is slow; {_percent(wait / step)} of each step of {_ms(step)} ms goes into communication"
    computing = statistics.mean(row.mean(Span.FORWARD, Span.BACKWARD, Span.OPTIMIZER) for row in all_rows)
    alone = "no rank is slow; " if len(rows) > 1 else ""
    return f"{alone}{_percent(computing / step)} of each step of {_ms(step)} ms is computing"


def _advice(loaders: int | None, cores: int | None) -> str:
    """Return advice for ranks that wait for data."""
    if loaders == 0:
        several = max(1, (cores or 2) - 1)
        return f"load it in separate processes (num_workers={several}, or fabricx.data.Preprocess)"
    if loaders is not None and cores is not None and loaders < cores - 1:
        return (
            f"use more of the {cores} cores per rank for loading (num_workers={cores - 1} instead of {loaders}), "
            "or prefetch more (prefetch_factor)"
        )
    return "use more loader workers (num_workers), prefetch more (prefetch_factor), or do less work per sample"


def _slow(rank: int, rows: Sequence[Row], index: int, score: float, *, synchronous: bool) -> str:
    """Return the span in which a rank is slow, and the cost for the other ranks."""
    rest = [row for number, row in enumerate(rows) if number != index]
    by_span = {
        span: (rows[index].mean(span), statistics.median(row.mean(span) for row in rest))
        for span in Span
        if span not in (*NOT_OF_A_STEP, *WAITING)
    }
    span = max(by_span, key=lambda span: by_span[span][0] - by_span[span][1])
    slow_s, median_s = by_span[span]
    cost = f"it costs {_percent(score)} of each step" if synchronous else "the other ranks don't wait for it"
    return f"rank {rank} is slow in {SPAN_LABELS[span]}: {_ms(slow_s)} ms against {_ms(median_s)}; {cost}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    ms = 1000.0 * seconds
    return f"{ms:.1f}" if ms < 100.0 else f"{ms:.0f}"
