"""Something to be done every so often by all ranks together, decided by the main rank's clock."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from fabricx.distributed.world import World

_ASKED_PER_INTERVAL: Final = 10


def steps_until_asking(remaining_s: float, interval_s: float, s_per_step: float) -> int:
    """Return after how many steps the clock is looked at again.

    That is when time should be up at the present speed, but at the latest after a tenth of the interval, in case
    steps become slower.

    >>> steps_until_asking(remaining_s=600, interval_s=600, s_per_step=0.1)
    600
    >>> steps_until_asking(remaining_s=0.01, interval_s=600, s_per_step=0.1)
    1

    Args:
        remaining_s: seconds until it is due.
        interval_s: seconds from one time to the next.
        s_per_step: seconds that a step takes at present.
    """
    return max(1, int(min(remaining_s, interval_s / _ASKED_PER_INTERVAL) / max(s_per_step, 1e-9)))


@final
class TimeInterval:
    """Tells all ranks at the same step that an interval has passed, with about ten broadcasts in that time.

    Every rank has to call `due` with the same steps, in the same order.
    """

    def __init__(self, interval: timedelta) -> None:
        self.interval_s = interval.total_seconds()
        self.start(0)

    def start(self, step: int) -> None:
        """Begin an interval at a step."""
        self._due_at = time.monotonic() + self.interval_s
        self._ask_at = step + 1
        self._asked_step, self._asked_time = step, time.monotonic()

    def state(self) -> list[int]:
        """Return what another rank needs to ask at the same steps; the time is the main rank's."""
        return [self._ask_at, self._asked_step]

    def set_state(self, state: list[int]) -> None:
        """Ask at the steps at which the rank does whose state it is."""
        self._ask_at, self._asked_step = state

    def due(self, step: int, world: World, *, ask: bool = False) -> bool:
        """Return whether the interval has passed, and begin the next; `ask` looks at the clock whatever the step is."""
        due = self._asked(step, world, ask)
        if due:
            self.start(step)
        return due

    def _asked(self, step: int, world: World, ask: bool) -> bool:
        if world.size == 1:
            return time.monotonic() >= self._due_at
        if step < self._ask_at and not ask:
            return False
        now = time.monotonic()
        s_per_step = (now - self._asked_time) / max(1, step - self._asked_step)
        wait = steps_until_asking(self._due_at - now, self.interval_s, s_per_step)
        due, wait = world.broadcast_object((now >= self._due_at, wait))
        self._ask_at, self._asked_step, self._asked_time = step + wait, step, now
        return bool(due)
