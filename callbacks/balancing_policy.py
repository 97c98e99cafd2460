"""Policy of `LoadBalancer`: samples per rank from measured speeds, as pure functions and a state without clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

SPEED_CHANGE: Final = 0.25  # change of a speed's logarithm above which it is a real change rather than noise
SMALL_CHANGE: Final = 0.25  # largest change of a share at a decision, as a fraction of it or of an equal share
LARGE_CHANGE: Final = 0.5  # the same, for the first decisions and those after a real change of speed
LARGE_CHANGES: Final = 3  # number of these first decisions
MIN_PREDICTED_GAIN: Final = 0.05  # a change is tried if it should shorten steps by at least this fraction
MIN_MEASURED_GAIN: Final = 0.01  # and kept if it shortened them by at least this fraction
MAX_PAUSE: Final = 16  # most windows until the next trial


@final
@dataclass(frozen=True)
class Measurement:
    """Measurements of a rank in a window of steps.

    Attributes:
        speed: median samples per second of the rank's computation, without time spent waiting for other ranks.
        spread: standard deviation of this median, as a fraction of it.
        step_s: median seconds of a whole step.
    """

    speed: float
    spread: float
    step_s: float


def share_batch(
    speeds: Sequence[float], samples: int, least: Sequence[int] | None = None, most: Sequence[int] | None = None
) -> list[int]:
    """Divide a global batch in proportion to speeds, within limits, by largest remainder (Hamilton, 1792).

    Rounding may cost a slow rank more time than a fast rank gains. Therefore single samples are moved from the slowest
    rank of the step as long as this shortens the step.

    Args:
        speeds: speed of each rank, shape [world_size], in any unit.
        samples: samples of the global batch.
        least: fewest samples of each rank, shape [world_size]; default: 1.
        most: most samples of each rank, shape [world_size]; default: `samples`.

    Returns:
        samples of each rank, shape [world_size]; their sum is `samples`.

    Raises:
        ValueError: a speed is not positive and finite, or the limits cannot be met.

    >>> share_batch([1, 1, 2], 16), share_batch([1, 1, 98], 10), share_batch([1, 3], 16, most=[16, 10])
    ([4, 4, 8], [1, 1, 8], [6, 10])
    >>> share_batch([3, 3, 1], 24)  # largest remainders alone would result in [10, 10, 4]
    [11, 10, 3]
    """
    low = list(least or [1] * len(speeds))
    high = list(most or [samples] * len(speeds))
    if not all(0.0 < speed < math.inf for speed in speeds):
        raise ValueError(f"speeds must be positive and finite: {list(speeds)}")
    if not sum(low) <= samples <= sum(high):
        raise ValueError(
            f"{samples} samples can't be divided with at least {low} and at most {high} for the ranks: allow larger "
            "shares, or use fewer ranks"
        )
    exact = _within(speeds, samples, low, high)
    shares = [min(h, max(lo, math.floor(part + 1e-9))) for part, lo, h in zip(exact, low, high, strict=True)]
    # Among equal remainders the fastest rank is first, because it needs the least time for a sample.
    order = sorted(range(len(shares)), key=lambda rank: (round(shares[rank] - exact[rank], 6), -speeds[rank], rank))
    while (remaining := samples - sum(shares)) > 0:
        for rank in [rank for rank in order if shares[rank] < high[rank]][:remaining]:
            shares[rank] += 1
    while True:
        ranks = range(len(shares))
        longest = max(ranks, key=lambda rank: shares[rank] / speeds[rank])
        able = [rank for rank in ranks if rank != longest and shares[rank] < high[rank]]
        to = min(able, key=lambda rank: (shares[rank] + 1) / speeds[rank], default=longest)
        if shares[longest] == low[longest] or (shares[to] + 1) / speeds[to] >= shares[longest] / speeds[longest]:
            return shares
        shares[longest], shares[to] = shares[longest] - 1, shares[to] + 1


def _within(speeds: Sequence[float], samples: int, low: Sequence[int], high: Sequence[int]) -> list[float]:
    """Return fractional shares in proportion to speeds, clamped to the limits; bisects the common time of a step."""
    short, long = 0.0, max(h / speed for h, speed in zip(high, speeds, strict=True))
    for _ in range(100):
        seconds = (short + long) / 2
        shares = [min(h, max(lo, seconds * v)) for v, lo, h in zip(speeds, low, high, strict=True)]
        short, long = (short, seconds) if sum(shares) > samples else (seconds, long)
    return [min(h, max(lo, short * v)) for v, lo, h in zip(speeds, low, high, strict=True)]


@final
@dataclass
class SharePolicy:
    """Shares in proportion to smoothed speeds, changed gradually, and kept only if steps become shorter.

    If ranks share a core or a network link, the speed of a rank depends on the load of the other ranks. Proportional
    shares may then diverge and lengthen the steps. Therefore a change that does not shorten steps is reverted, and the
    pause before the next trial doubles each time, up to 16 windows. The proportional part follows LB-BSP (Chen et al.,
    "Semi-dynamic load balancing", SoCC 2020); reverting is an addition.

    Args:
        samples: samples of a global batch.
        shares: present samples of each rank, shape [world_size].
        speeds: smoothed speed of each rank, samples per second, shape [world_size]; empty before a measurement.
    """

    samples: int
    shares: list[int]
    speeds: list[float] = field(default_factory=list)
    _unchanged: int = 1  # windows since the last change of shares
    _windows: int = 0  # windows since the first measurement or the last real change of a speed
    _trial: tuple[list[int], float] | None = None  # shares and seconds per step before the change that is on trial
    _pause: int = 1  # windows to pause after the next revert
    _remaining_pause: int = 0

    def decide(self, measurements: Sequence[Measurement]) -> list[int] | None:
        """Process the measurements of a window of steps with the present shares.

        Args:
            measurements: measurements of each rank, in order of ranks.

        Returns:
            new samples of each rank, or None to keep the present shares.
        """
        step_s = max(measurement.step_s for measurement in measurements)
        if self._smooth(measurements) and self._unchanged:  # after a change of shares, that may be the cause
            self._pause, self._remaining_pause, self._windows = 1, 0, 0
        self._unchanged += 1
        if self._trial is not None:
            (shares, before), self._trial = self._trial, None
            if step_s > before * (1.0 - MIN_MEASURED_GAIN):
                self._remaining_pause, self._pause = self._pause, min(MAX_PAUSE, 2 * self._pause)
                self.shares, self._unchanged = shares, 0
                return shares
            self._pause = 1
        self._windows += 1
        if self._remaining_pause:
            self._remaining_pause -= 1
            return None
        wanted = self._proportional(LARGE_CHANGE if self._windows <= LARGE_CHANGES else SMALL_CHANGE)
        if self._seconds(wanted) > self._seconds(self.shares) * (1.0 - MIN_PREDICTED_GAIN):
            return None
        self._trial, self.shares, self._unchanged = (self.shares, step_s), wanted, 0
        return wanted

    @property
    def gain(self) -> float:
        """Return the computing time of a step with equal shares, divided by that with the present shares."""
        equal = [self.samples / len(self.shares)] * len(self.shares)
        return self._seconds(equal) / self._seconds(self.shares) if self.speeds else 1.0

    def _smooth(self, measurements: Sequence[Measurement]) -> bool:
        """Update the smoothed speeds; return whether a speed changed by more than its noise."""
        now = [measurement.speed for measurement in measurements]
        if not self.speeds:
            self.speeds = now
            return True
        changes = [abs(math.log(v / mean)) for v, mean in zip(now, self.speeds, strict=True)]
        jumps = [
            change > max(SPEED_CHANGE, 4.0 * measurement.spread)
            for change, measurement in zip(changes, measurements, strict=True)
        ]
        weight = max(0.2, 1.0 / (1.0 + self._windows / 2.0))
        self.speeds = [
            v if jump else (1.0 - weight) * mean + weight * v
            for v, mean, jump in zip(now, self.speeds, jumps, strict=True)
        ]
        return any(jumps)

    def _proportional(self, max_change: float) -> list[int]:
        """Return shares in proportion to speeds, each changed by at most the fraction `max_change`."""
        equal = self.samples / len(self.shares)  # a fraction of a small share alone would be too small to be tried
        steps = [max(1, math.floor(max_change * max(share, equal))) for share in self.shares]
        least = [
            max(1, share - step, math.ceil(share * (1.0 - LARGE_CHANGE)))
            for share, step in zip(self.shares, steps, strict=True)
        ]
        most = [share + step for share, step in zip(self.shares, steps, strict=True)]
        return share_batch(self.speeds, self.samples, least, most)

    def _seconds(self, shares: Sequence[float]) -> float:
        return max(share / speed for share, speed in zip(shares, self.speeds, strict=True))
