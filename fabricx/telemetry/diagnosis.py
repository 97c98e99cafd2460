"""The bottleneck of a run in a sentence: pure functions of each rank's times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from fabricx.telemetry.recorder import Span
from fabricx.telemetry.run import NOT_OF_A_STEP, OTHERS, Row, Run, joined

WORDS: Final[Mapping[str, str]] = {
    Span.DATA: "data wait", Span.TRANSFER: "transfer", Span.FORWARD: "forward", Span.BACKWARD: "backward",
    Span.WAIT: "communication wait", Span.OPTIMIZER: "optimizer", Span.PUSH: "push", Span.PULL: "pull",
    Span.CHECKPOINT: "checkpoint", Span.VALIDATION: "validation", Span.OTHER: "callbacks and logging",
}  # fmt: skip
SLOW: Final = 0.10  # of a step, from which on a rank that others wait for is called slow
HUNGRY: Final = 0.10  # of a step, from which on waiting for data is worth advice
TALKING: Final = 0.30  # of a step, from which on waiting for others is


def straggler_scores(rows: Sequence[Row]) -> list[float]:
    """Return by rank how much of a step the others would gain if it were as fast as they are, from 0 to 1.

    A rank is compared by its busy time: under a synchronous strategy all ranks' steps take equally long.

    >>> slow, fast = Row(1, 0.0, 1, 8, {"forward": 0.009}), Row(1, 0.0, 1, 8, {"forward": 0.003, "wait": 0.006})
    >>> [round(score, 2) for score in straggler_scores([fast, slow])]
    [0.0, 0.67]
    """
    busy = [row.busy_s for row in rows]
    step = max((row.step_s for row in rows), default=0.0)
    if len(rows) < 2 or step <= 0.0:
        return [0.0] * len(rows)
    others = [statistics.median(busy[:place] + busy[place + 1 :]) for place in range(len(busy))]
    return [min(1.0, max(0.0, (own - rest) / step)) for own, rest in zip(busy, others, strict=True)]


def verdict(run: Run) -> str:
    """Return what slows the run down most, in one sentence."""
    found = {rank.rank: joined(rank.rows) for rank in run.present}
    known = next((rank.known for rank in run.present), {})
    return judge(
        {rank: row for rank, row in found.items() if row.steps}, synchronous=run.synchronous,
        loaders=known.get("loader_processes"), cores=known.get("cores"),
    )  # fmt: skip


def judge(
    rows: Mapping[int, Row], *, synchronous: bool, loaders: int | None = None, cores: int | None = None
) -> str:  # fmt: skip
    """Return what slows ranks down most.

    Args:
        rows: all steps of each rank.
        synchronous: does each rank wait for all others?
        loaders: processes that load data for each rank, if known.
        cores: of the machine for each rank, if known.

    >>> judge({0: Row(9, 0.0, 9, 72, {"data": 0.0009, "forward": 0.09})}, synchronous=True)
    '99 % of each step of 10.1 ms is computing'
    """
    if not rows:
        return "no step is done yet, or too few to say anything"
    ranks, all_rows = list(rows), list(rows.values())
    step = max(row.step_s for row in all_rows)
    if step <= 0.0:
        return "steps take no time that could be measured"
    scores = straggler_scores(all_rows)
    worst = max(range(len(scores)), key=scores.__getitem__)
    if scores[worst] >= SLOW:
        return _slow(ranks[worst], all_rows, worst, scores[worst], synchronous=synchronous)
    data = max(row.mean(Span.DATA) for row in all_rows)
    if data >= HUNGRY * step:
        return (
            f"waiting for data takes {_ms(data)} ms of each step of {_ms(step)} ms, {_percent(data / step)}: "
            f"{_advice(loaders, cores)}"
        )
    wait = min(row.mean(*OTHERS, Span.PUSH) for row in all_rows)
    if wait >= TALKING * step:
        return f"no rank is slow; {_percent(wait / step)} of each step of {_ms(step)} ms goes into communication"
    computing = statistics.mean(row.mean(Span.FORWARD, Span.BACKWARD, Span.OPTIMIZER) for row in all_rows)
    alone = "no rank is slow; " if len(rows) > 1 else ""
    return f"{alone}{_percent(computing / step)} of each step of {_ms(step)} ms is computing"


def _advice(loaders: int | None, cores: int | None) -> str:
    """Return what helps where ranks wait for data."""
    if loaders == 0:
        several = max(1, (cores or 2) - 1)
        return f"load it on processes of their own (num_workers={several}, or fabricx.data.Preprocess)"
    if loaders is not None and cores is not None and loaders < cores - 1:
        return (
            f"more of the machine's {cores} cores a rank can load (num_workers={cores - 1} in the place of {loaders}), "
            "or further ahead (prefetch_factor)"
        )
    return "more loader workers (num_workers), further ahead (prefetch_factor), or less work for each sample"


def _slow(rank: int, rows: Sequence[Row], place: int, score: float, *, synchronous: bool) -> str:
    """Return in what a rank is slow, and what that costs the others."""
    rest = [row for number, row in enumerate(rows) if number != place]
    own = {
        span: (rows[place].mean(span), statistics.median(row.mean(span) for row in rest))
        for span in Span
        if span not in (*NOT_OF_A_STEP, *OTHERS)
    }
    span = max(own, key=lambda one: own[one][0] - own[one][1])
    mine, theirs = own[span]
    cost = f"it costs {_percent(score)} of each step" if synchronous else "the others don't wait for it"
    return f"rank {rank} is slow in {WORDS[span]}: {_ms(mine)} ms against {_ms(theirs)}; {cost}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    ms = 1000.0 * seconds
    return f"{ms:.1f}" if ms < 100.0 else f"{ms:.0f}"
