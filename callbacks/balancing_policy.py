"""Which rank gets how many samples, by measured speeds: pure functions and a state, without processes or clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

CHANGED: Final = 0.25  # of the logarithm of a speed: more than that is a real change, and not noise
SLOWLY: Final = 0.25  # the most that a share changes at a decision, as a part of it or of an equal share
FAST: Final = 0.5  # and at the first few, or those after a real change
FEW: Final = 3
WORTH: Final = 0.05  # what a change has to promise, of a step's time
KEPT: Final = 0.01  # and what it has to bring
LONGEST: Final = 16  # windows until a change is tried again


@final
@dataclass(frozen=True)
class Seen:
    """What one rank has measured in a window of steps.

    Attributes:
        speed: samples per second of its own work, without waiting; the median.
        spread: of that median, as a part of it (one standard deviation).
        step_s: seconds of a whole step; the median.
    """

    speed: float
    spread: float
    step_s: float


def share_batch(
    speeds: Sequence[float], samples: int, least: Sequence[int] | None = None, most: Sequence[int] | None = None
) -> list[int]:
    """Divide a global batch in proportion to speeds, within limits, by largest remainder (Hamilton, 1792).

    A remainder may be worth more time to a slow rank than to a fast one: then single samples move on, while the one
    that takes the longest gets shorter by it.

    Args:
        speeds: of each rank, in any unit.
        samples: of the global batch.
        least, most: samples of each rank; 1 and all if not given.

    Raises:
        ValueError: a speed isn't positive and finite, or the limits can't be kept.

    >>> share_batch([1, 1, 2], 16), share_batch([1, 1, 98], 10), share_batch([1, 3], 16, most=[16, 10])
    ([4, 4, 8], [1, 1, 8], [6, 10])
    >>> share_batch([3, 3, 1], 24)  # by remainders it would be 10, 10, 4
    [11, 10, 3]
    """
    low = list(least or [1] * len(speeds))
    high = list(most or [samples] * len(speeds))
    if not all(0.0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds have to be positive and finite: {list(speeds)}")
    if not sum(low) <= samples <= sum(high):
        raise ValueError(f"{samples} samples can't be divided with at least {low} and at most {high} for the ranks")
    exact = _within(speeds, samples, low, high)
    given = [min(h, max(lo, math.floor(part + 1e-9))) for part, lo, h in zip(exact, low, high, strict=True)]
    # Of remainders that are equal, the fastest's: it takes the least time for it.
    order = sorted(range(len(given)), key=lambda rank: (round(given[rank] - exact[rank], 6), -speeds[rank], rank))
    while (left := samples - sum(given)) > 0:
        for rank in [rank for rank in order if given[rank] < high[rank]][:left]:
            given[rank] += 1
    while True:
        ranks = range(len(given))
        longest = max(ranks, key=lambda rank: given[rank] / speeds[rank])
        able = [rank for rank in ranks if rank != longest and given[rank] < high[rank]]
        to = min(able, key=lambda rank: (given[rank] + 1) / speeds[rank], default=longest)
        if given[longest] == low[longest] or (given[to] + 1) / speeds[to] >= given[longest] / speeds[longest]:
            return given
        given[longest], given[to] = given[longest] - 1, given[to] + 1


def _within(speeds: Sequence[float], samples: int, low: Sequence[int], high: Sequence[int]) -> list[float]:
    """Return shares in proportion to speeds, but for those at a limit: the time that all take is searched by halves."""
    short, long = 0.0, max(h / speed for h, speed in zip(high, speeds, strict=True))
    for _ in range(100):
        seconds = (short + long) / 2
        found = [min(h, max(lo, seconds * v)) for v, lo, h in zip(speeds, low, high, strict=True)]
        short, long = (short, seconds) if sum(found) > samples else (seconds, long)
    return [min(h, max(lo, short * v)) for v, lo, h in zip(speeds, low, high, strict=True)]


@final
@dataclass
class Law:
    """Shares in proportion to smoothed speeds, changed slowly, and kept only if steps have become shorter.

    The speed of a rank that shares a core or a link with another depends on what that one does: there shares in
    proportion to speeds may run away, and steps become longer. So a change that hasn't made them shorter is taken back,
    and the next try waits, each time twice as long, up to 16 windows. The law and its figures: Chen et al., "Semi-
    dynamic load balancing", SoCC 2020 (LB-BSP), for the proportional part; the guard is our own.

    Args:
        samples: of a global batch.
        shares: of each rank, now.
    """

    samples: int
    shares: list[int]
    speeds: list[float] = field(default_factory=list)
    _same: int = 1  # windows that the shares have been what they are
    _known: int = 0  # windows since the speeds were known, or have changed
    _before: tuple[list[int], float] | None = None  # shares and seconds of a step, before the change that is tried
    _pause: int = 1  # windows, when a change is taken back
    _waits: int = 0

    def decide(self, seen: Sequence[Seen]) -> list[int] | None:
        """Take a window of steps with the present shares; returns new ones, or None to stay with them."""
        step_s = max(one.step_s for one in seen)
        if self._smooth(seen) and self._same:  # else other shares may be the reason
            self._pause, self._waits, self._known = 1, 0, 0
        self._same += 1
        if self._before is not None:
            (shares, before), self._before = self._before, None
            if step_s > before * (1.0 - KEPT):
                self._waits, self._pause = self._pause, min(LONGEST, 2 * self._pause)
                self.shares, self._same = shares, 0
                return shares
            self._pause = 1
        self._known += 1
        if self._waits:
            self._waits -= 1
            return None
        wanted = self._wanted(FAST if self._known <= FEW else SLOWLY)
        if self._seconds(wanted) > self._seconds(self.shares) * (1.0 - WORTH):
            return None
        self._before, self.shares, self._same = (self.shares, step_s), wanted, 0
        return wanted

    @property
    def gain(self) -> float:
        """Return how many times as long the slowest rank would compute with equal shares, at its speed of now."""
        equal = [self.samples / len(self.shares)] * len(self.shares)
        return self._seconds(equal) / self._seconds(self.shares) if self.speeds else 1.0

    def _smooth(self, seen: Sequence[Seen]) -> bool:
        """Take new speeds into the mean; returns whether one of them is another than it was, beyond its noise."""
        now = [one.speed for one in seen]
        if not self.speeds:
            self.speeds = now
            return True
        off = [abs(math.log(v / mean)) for v, mean in zip(now, self.speeds, strict=True)]
        jumps = [by > max(CHANGED, 4.0 * one.spread) for by, one in zip(off, seen, strict=True)]
        weight = max(0.2, 1.0 / (1.0 + self._known / 2.0))
        self.speeds = [
            v if jump else (1.0 - weight) * mean + weight * v
            for v, mean, jump in zip(now, self.speeds, jumps, strict=True)
        ]
        return any(jumps)

    def _wanted(self, by: float) -> list[int]:
        """Return shares in proportion to speeds, none of them changed by more than a part."""
        equal = self.samples / len(self.shares)  # else a small share would grow by too little to be worth a try
        steps = [max(1, math.floor(by * max(share, equal))) for share in self.shares]
        least = [
            max(1, share - step, math.ceil(share * (1.0 - FAST)))
            for share, step in zip(self.shares, steps, strict=True)
        ]
        most = [share + step for share, step in zip(self.shares, steps, strict=True)]
        return share_batch(self.speeds, self.samples, least, most)

    def _seconds(self, shares: Sequence[float]) -> float:
        return max(share / speed for share, speed in zip(shares, self.speeds, strict=True))
