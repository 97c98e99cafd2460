"""When a process is given up: it gives no sign of life, or comes no further."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

ASLEEP_S: Final = 5.0  # if nobody has looked for so long, it was the supervisor that was stopped


@dataclass
class _Life:
    """When something was heard of a process, how far it was, and since when."""

    heard: float
    reached: int
    since: float
    waits: bool = False


@final
class Watch:
    """Keeps the signs of life of several processes.

    Args:
        frozen_after: seconds without a sign of life.
        stuck_after: seconds without having come further, once the first batch is done; None for any number.
        clock: seconds.
    """

    def __init__(
        self, frozen_after: float, stuck_after: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._frozen_after, self._stuck_after, self._clock = frozen_after, stuck_after, clock
        self._lives: dict[int, _Life] = {}
        self._looked = clock()

    def heard(self, rank: int, reached: int, waits: bool = False) -> None:
        """Note a sign of life: how many batches the main thread has seen, and whether it seems to wait for others."""
        now = self._clock()
        life = self._lives.setdefault(rank, _Life(now, reached, now))
        life.heard, life.waits = now, waits
        if reached != life.reached:
            life.reached, life.since = reached, now

    def over(self, rank: int) -> None:
        """Expect nothing of a process any more."""
        self._lives.pop(rank, None)
        for life in self._lives.values():  # they may have waited for it
            life.since = self._clock()

    def silent(self) -> dict[int, str]:
        """Return which processes are to be given up, and why."""
        now = self._clock()
        asleep = now - self._looked
        self._looked = now
        if asleep > ASLEEP_S:  # nothing was read meanwhile
            for life in self._lives.values():
                life.heard += asleep
                life.since += asleep
        found = {}
        holding_up = self._holding_up()
        for rank, life in self._lives.items():
            if now - life.heard > self._frozen_after:
                found[rank] = (
                    f"it gave no sign of life for {now - life.heard:.0f} s and was ended: the process was stopped, or "
                    "something in it held the interpreter's lock (FaultRecovery(frozen_after=...) waits longer)"
                )
            elif self._stuck_after is not None and rank in holding_up and now - life.since > self._stuck_after:
                found[rank] = (
                    f"it came no batch further for {now - life.since:.0f} s and was ended (stuck_after="
                    f"{self._stuck_after:g})"
                )
        return found

    def _holding_up(self) -> set[int]:
        """Return those for whom the others may wait: of those that have come least far, who isn't waiting itself."""
        begun = {rank: life for rank, life in self._lives.items() if life.reached}
        least = min((life.reached for life in begun.values()), default=0)
        last = {rank for rank, life in begun.items() if life.reached == least}
        busy = {rank for rank in last if not begun[rank].waits}
        return busy or last
