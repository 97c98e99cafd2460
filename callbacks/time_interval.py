"""Periodic actions that all ranks start at the same step, timed by the main rank's clock."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from fabricx.distributed.world import World

_CHECKS_PER_INTERVAL: Final = 10


def steps_until_check(remaining_s: float, interval_s: float, s_per_step: float) -> int:
    """Return the number of steps until the next check of the clock.

    The check is due when the interval should end at the present speed, but after a tenth of the interval at the
    latest, in case steps become slower.

    >>> steps_until_check(remaining_s=600, interval_s=600, s_per_step=0.1)
    600
    >>> steps_until_check(remaining_s=0.01, interval_s=600, s_per_step=0.1)
    1

    Args:
        remaining_s: seconds until the end of the interval.
        interval_s: length of the interval in seconds.
        s_per_step: present duration of a step in seconds.
    """
    return max(1, int(min(remaining_s, interval_s / _CHECKS_PER_INTERVAL) / max(s_per_step, 1e-9)))


@final
class TimeInterval:
    """Detect on all ranks at the same step that an interval has passed, with about ten broadcasts per interval.

    Every rank must call `due` with the same steps, in the same order.

    Args:
        interval: time between two actions.
    """

    def __init__(self, interval: timedelta) -> None:
        self.interval_s = interval.total_seconds()
        self.start(0)

    def start(self, step: int) -> None:
        """Begin an interval.

        Args:
            step: the current weight update.
        """
        self._due_at = time.monotonic() + self.interval_s
        self._check_at = step + 1
        self._checked_step, self._checked_time = step, time.monotonic()

    def state(self) -> list[int]:
        """Return the state with which a replacement rank checks the clock at the same steps."""
        return [self._check_at, self._checked_step]

    def set_state(self, state: list[int]) -> None:
        """Check the clock at the same steps as the rank that `state` was read from.

        Args:
            state: result of `state`: step of the next check and step of the last check.
        """
        self._check_at, self._checked_step = state

    def due(self, step: int, world: World, *, ask: bool = False) -> bool:
        """Return whether the interval has passed; if so, begin the next interval.

        Args:
            step: the current weight update.
            world: the ranks that decide together; a check broadcasts from the main rank.
            ask: check the clock at this step in any case.
        """
        due = self._check(step, world, ask)
        if due:
            self.start(step)
        return due

    def _check(self, step: int, world: World, ask: bool) -> bool:
        if world.size == 1:
            return time.monotonic() >= self._due_at
        if step < self._check_at and not ask:
            return False
        now = time.monotonic()
        s_per_step = (now - self._checked_time) / max(1, step - self._checked_step)
        wait = steps_until_check(self._due_at - now, self.interval_s, s_per_step)
        due, wait = world.broadcast_object((now >= self._due_at, wait))
        self._check_at, self._checked_step, self._checked_time = step + wait, step, now
        return bool(due)
