"""Timeline of a run: a lane per rank, with the shares of its activities over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabricx.telemetry.events import Span
from fabricx.telemetry.timeline import AFTER, DOWN, RECOVERY, START, UNMEASURED, Timeline

_COMPUTE: Final = (Span.TRANSFER, Span.FORWARD, Span.BACKWARD, Span.OPTIMIZER)
_WAIT: Final = (Span.WAIT, Span.PULL, Span.PUSH)
_MAX_CELLS: Final = 4096  # most bins of all lanes for the script
SVG_CELLS: Final = 1024  # most bins of all lanes in the SVG
_SVG_HEIGHT: Final = 100


@dataclass(frozen=True)
class Activity:
    """A category of a rank's time.

    Attributes:
        name: label.
        colour: name of the colour in the page's style.
        sources: its spans of the recorder, or its activity outside of spans.
        help: description.
    """

    name: str
    colour: str
    sources: tuple[str, ...]
    help: str


ACTIVITIES: Final = (
    Activity("start-up", "start", (START,), "from the launch to the first batch: imports, set-up, sanity check"),
    Activity("data wait", "data", (Span.DATA,), "waiting for the next batch of the loader"),
    Activity("compute", "compute", _COMPUTE, "transfer to the device, forward, backward, optimizer"),
    Activity("wait for others", "wait", _WAIT, "waiting for other ranks or for parameter servers"),
    Activity("validate", "validate", (Span.VALIDATION,), "validation batches and their hooks"),
    Activity("save", "save", (Span.CHECKPOINT,), "the part of saving checkpoints that training waits for"),
    Activity("other", "other", (Span.OTHER,), "callbacks, logging, and the loop itself"),
    Activity("recovery", "recovery", (RECOVERY,), "from a failure, or the start of a replacement, to the next batch"),
    Activity("down", "down", (DOWN,), "no process held the rank; includes its last, unrecorded second before a kill"),
    Activity("after training", "after", (AFTER,), "from the rank's last batch to the run's end: closing files, tests"),
    Activity("unmeasured", "unmeasured", (UNMEASURED,), "time without records, such as an unfinished step"),
)  # fmt: skip
_NUMBER: Final = {source: number for number, activity in enumerate(ACTIVITIES) for source in activity.sources}


@dataclass(frozen=True)
class Lane:
    """The timeline of a rank.

    Attributes:
        rank: the rank.
        width_s: width of a bin, seconds; the first bin begins with the run.
        bins: for each bin, fractions of its time by number of the activity.
        seconds: seconds of the whole run, by number of the activity.
    """

    rank: int
    width_s: float
    bins: list[dict[int, float]]
    seconds: dict[int, float]

    def data(self) -> dict[str, Any]:
        """Return the lane as plain data: bins are flat lists of number and percent; equal bins are counted."""
        cells: list[list[int]] = []
        for shares in self.bins:
            percents = [(number, round(100 * share)) for number, share in sorted(shares.items())]
            pairs = [part for pair in percents if pair[1] for part in pair]
            if cells and cells[-1][1:] == pairs:
                cells[-1][0] += 1
            else:
                cells.append([1, *pairs])
        return {"rank": self.rank, "w": self.width_s, "cells": cells}


def lanes(timelines: Mapping[int, Timeline], most: int = _MAX_CELLS) -> list[Lane]:
    """Return the lanes of all ranks, with bins of equal width.

    Args:
        timelines: timelines by rank.
        most: most bins of all lanes.
    """
    longest = max((timeline.activity.width for timeline in timelines.values()), default=0.0)
    most_each = max(8, most // max(1, len(timelines)))
    count = max(
        (len(timeline.activity.bins) * timeline.activity.width / longest for timeline in timelines.values()),
        default=1.0,
    )
    while count > most_each:
        longest, count = 2 * longest, count / 2
    drawn = []
    for rank, timeline in sorted(timelines.items()):
        merge = round(longest / timeline.activity.width)
        bins = timeline.activity.bins
        groups = [_summed(bins[begin : begin + merge]) for begin in range(0, len(bins), merge)]
        groups = groups if not groups or groups[-1] else groups[:-1]  # the run ended where a bin begins
        seconds = _summed(bins)
        shares = [{n: spent / sum(group.values()) for n, spent in group.items()} for group in groups]
        drawn.append(Lane(rank, longest, shares, seconds))
    return drawn


def _summed(bins: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Return the sum of some bins, by number of the activity."""
    sums: dict[int, float] = {}
    for values in bins:
        for name, seconds in values.items():
            number = _NUMBER.get(name, _NUMBER[UNMEASURED])
            sums[number] = sums.get(number, 0.0) + seconds
    return sums


def lane_svg(lane: Lane, seconds: float) -> str:
    """Draw a lane.

    Each activity is an area from the base line that later activities cover in part: its visible height is its share.

    Args:
        lane: the lane.
        seconds: duration of the run.
    """
    width = 1000 * lane.width_s / max(1e-9, seconds)
    paths = []
    for number in sorted(lane.seconds, reverse=True):
        tops = [_SVG_HEIGHT * sum(shares.get(n, 0.0) for n in range(number + 1)) for shares in lane.bins]
        steps, run, before = [], 0, 0
        for top in [*(round(top) for top in tops), None]:
            if top == before:
                run += 1
                continue
            steps.append(f"h{run * width:.4g}" if run else "")
            steps.append(f"V{_SVG_HEIGHT - top}" if top is not None else f"V{_SVG_HEIGHT}z")
            run, before = 1, top if top is not None else 0
        paths.append(f'<path class="a-{ACTIVITIES[number].colour}" d="M0 {_SVG_HEIGHT}{"".join(steps)}"/>')
    return (
        f'<svg class="lane" viewBox="0 0 1000 {_SVG_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="timeline of rank {lane.rank}">{"".join(paths)}</svg>'
    )
