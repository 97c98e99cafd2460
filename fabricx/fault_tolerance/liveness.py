"""Decides when a process counts as lost: no heartbeat, or no progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

ASLEEP_S: Final = 5.0  # if nobody has looked for so long, it was the supervisor that was stopped
START_S: Final = 240.0  # until the first sign of life of a process, which imports the user's script before it
LEAST_S: Final = 60.0  # the shortest pause of which something is said, and that "learned" takes for the end
MANY: Final = 20  # times the longest pause before: the same


@dataclass
class _Life:
    """When something was heard of a process, how far it was, and since when."""

    heard: float
    reached: int
    since: float
    limit: float  # seconds without a sign of life
    waits: bool = False
    where: str = ""
    told: float = 0.0  # how long the pause was of which something was said last


@final
class HeartbeatMonitor:
    """Keeps the signs of life of several processes.

    Args:
        frozen_after: seconds without a sign of life.
        stuck_after: seconds without having come further, once the first batch is done; "learned" for many times the
            longest pause that there was; None for any number.
        clock: seconds.
    """

    def __init__(
        self, frozen_after: float, stuck_after: float | Literal["learned"] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._frozen_after, self._stuck_after, self._clock = frozen_after, stuck_after, clock
        self._longest = 0.0  # pause between two batches that came to an end
        self._lives: dict[int, _Life] = {}
        self._looked = clock()

    def started(self, rank: int) -> None:
        """Note the start of a process: its first sign of life may take `START_S`, or longer if others may."""
        now = self._clock()
        self._lives[rank] = _Life(now, 0, now, max(START_S, self._frozen_after))

    def heard(self, rank: int, reached: int, waits: bool = False, where: str = "") -> None:
        """Note a sign of life.

        Args:
            rank: whose.
            reached: how many batches its main thread has seen.
            waits: does that seem to wait for others?
            where: what it is at, if that takes long.
        """
        now = self._clock()
        life = self._lives.setdefault(rank, _Life(now, reached, now, self._frozen_after))
        life.heard, life.waits, life.where, life.limit = now, waits, where, self._frozen_after
        if reached != life.reached:
            if life.reached:
                self._longest = max(self._longest, now - life.since)
            life.reached, life.since, life.told = reached, now, 0.0

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
        limit = self._learned if isinstance(self._stuck_after, str) else self._stuck_after or math.inf
        for rank, life in self._lives.items():
            if now - life.heard > life.limit:
                found[rank] = (
                    f"it gave no sign of life for {now - life.heard:.0f} s and was ended: the process was stopped, or "
                    "something in it held the interpreter's lock (FaultRecovery(frozen_after=...) waits longer)"
                )
            elif rank in holding_up and now - life.since > limit:
                place = f", at {life.where}" if life.where else ""
                found[rank] = (
                    f"it came no batch further for {now - life.since:.0f} s{place}, and was ended (stuck_after="
                    f"{self._stuck_after})"
                )
        return found

    def frozen(self, rank: int) -> bool:
        """Return whether a process that gave signs of life gives none any more."""
        life = self._lives.get(rank)
        return life is not None and self._clock() - life.heard > life.limit

    def answers(self, rank: int) -> bool:
        """Return whether something was heard of a process lately."""
        return rank in self._lives and not self.frozen(rank)

    def news(self, name: Callable[[int], str] = "rank {}".format) -> str | None:
        """Return what to say of a pause that is far longer than all before; again when it has become twice as long.

        Args:
            name: of a process, by its number.
        """
        now = self._clock()
        last = min((self._lives[rank] for rank in self._holding_up()), key=lambda life: life.since, default=None)
        if last is None or now - last.since < max(self._learned, 2 * last.told):
            return None
        last.told = now - last.since
        lines = [
            f"  {name(rank)} {'waits for others' if life.waits else 'is'} at {life.where}"
            for rank, life in sorted(self._lives.items())
            if life.where
        ]
        before = f"the longest pause before was of {self._longest:.1f} s"
        return "\n".join([f"no further batch for {last.told:.0f} s ({before})", *lines])

    @property
    def _learned(self) -> float:
        return max(LEAST_S, MANY * self._longest)

    def _holding_up(self) -> set[int]:
        """Return those for whom the others may wait: of those that have come least far, who isn't waiting itself."""
        begun = {rank: life for rank, life in self._lives.items() if life.reached}
        least = min((life.reached for life in begun.values()), default=0)
        last = {rank for rank, life in begun.items() if life.reached == least}
        busy = {rank for rank in last if not begun[rank].waits}
        return busy or last
