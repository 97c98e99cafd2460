"""Decides when a process counts as lost: it sends no heartbeat, or makes no progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, final

ASLEEP_S: Final = 5.0  # a longer interval between two checks means that the supervisor itself was suspended
START_S: Final = 240.0  # limit for the first heartbeat of a process, which imports the user's script first
LEAST_S: Final = 60.0  # shortest pause that is reported, and lower bound of the "learned" limit
MANY: Final = 20  # the "learned" limit as a multiple of the longest pause


def learned_limit(longest_s: float) -> float:
    """Return the length of a pause between two batches, in seconds, from which it counts as unusual.

    Args:
        longest_s: longest completed pause between two batches, in seconds.
    """
    return max(LEAST_S, MANY * longest_s)


def pause_report(pause_s: float, longest_s: float, places: Iterable[tuple[str, bool, str]]) -> str:
    """Return the report of an unusual pause.

    Args:
        pause_s: seconds since the newest batch began.
        longest_s: longest completed pause, in seconds.
        places: for each process: its name, whether it waits for other processes, and the line of its main thread.
    """
    lines = [f"  {name} {'waits for others' if waits else 'is'} at {where}" for name, waits, where in places]
    before = f"the longest pause before was {longest_s:.1f} s"
    return "\n".join([f"no further batch for {pause_s:.0f} s ({before})", *lines])


@dataclass(frozen=True)
class Loss:
    """Why a process counts as lost.

    Attributes:
        reason: clause for a message to users; begins with "it".
        silent_s: seconds since its newest heartbeat or batch.
    """

    reason: str
    silent_s: float


@dataclass
class _Life:
    """Newest heartbeat and progress of a process."""

    heard: float  # time of the newest heartbeat
    reached: int  # batches
    since: float  # time of the newest progress
    limit: float  # longest time without a heartbeat, in seconds
    waits_since: float | None = None  # since when it seems to wait for other processes, without progress
    where: str = ""  # line of its main thread during a long pause
    reported_s: float = 0.0  # length of the pause in the newest report


@final
class HeartbeatMonitor:
    """Monitors the heartbeats and the progress of several processes.

    Args:
        frozen_after: seconds without a heartbeat, after which a process counts as lost.
        stuck_after: seconds without progress after the first batch, after which a process counts as lost; "learned"
            for `MANY` times the longest pause so far, at least `LEAST_S`; None for no limit.
        clock: returns seconds.
    """

    def __init__(
        self, frozen_after: float, stuck_after: float | Literal["learned"] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._frozen_after, self._stuck_after, self._clock = frozen_after, stuck_after, clock
        self._longest = 0.0  # longest completed pause between two batches, in seconds
        self._lives: dict[int, _Life] = {}
        self._checked = clock()

    def started(self, rank: int) -> None:
        """Record the start of a process; its first heartbeat may take `START_S` or `frozen_after`, if that is longer.

        Args:
            rank: rank of the process.
        """
        now = self._clock()
        self._lives[rank] = _Life(now, 0, now, max(START_S, self._frozen_after))

    def heard(self, rank: int, reached: int, waits: bool = False, where: str = "") -> None:
        """Record a heartbeat.

        Args:
            rank: rank of the process.
            reached: number of batches that its main thread has begun.
            waits: whether its main thread seems to wait for other processes.
            where: position of its main thread after a long pause; empty otherwise.
        """
        now = self._clock()
        life = self._lives.setdefault(rank, _Life(now, reached, now, self._frozen_after))
        life.heard, life.where, life.limit = now, where, self._frozen_after
        if not waits or life.waits_since is None or reached != life.reached:
            life.waits_since = now if waits else None
        if reached != life.reached:
            if life.reached:
                self._longest = max(self._longest, now - life.since)
            life.reached, life.since, life.reported_s = reached, now, 0.0

    def over(self, rank: int) -> None:
        """Stop monitoring a process.

        Args:
            rank: rank of the process.
        """
        self._lives.pop(rank, None)
        for life in self._lives.values():  # the other processes may have waited for this process
            life.since = self._clock()

    def silent(self) -> dict[int, Loss]:
        """Return the processes that count as lost, by rank."""
        now = self._clock()
        asleep = now - self._checked
        self._checked = now
        if asleep > ASLEEP_S:  # no heartbeat was read in this time
            for life in self._lives.values():
                life.heard += asleep
                life.since += asleep
        lost = {}
        suspects = self._suspects()
        limit = self._learned if isinstance(self._stuck_after, str) else self._stuck_after or math.inf
        for rank, life in self._lives.items():
            if now - life.heard > life.limit:
                lost[rank] = Loss(
                    f"it sent no heartbeat for {now - life.heard:.0f} s and was ended: the process was suspended, or "
                    "held the interpreter's lock (increase FaultRecovery(frozen_after=...) to wait longer)",
                    now - life.heard,
                )
            elif rank in suspects and now - life.since > limit:
                position = f", at {life.where}" if life.where else ""
                lost[rank] = Loss(
                    f"it completed no batch for {now - life.since:.0f} s{position}, and was ended (stuck_after="
                    f"{self._stuck_after}; increase it to wait longer)",
                    now - life.since,
                )
        return lost

    def frozen(self, rank: int) -> bool:
        """Return whether the heartbeat of a process is overdue.

        Args:
            rank: rank of the process.
        """
        life = self._lives.get(rank)
        return life is not None and self._clock() - life.heard > life.limit

    def answers(self, rank: int) -> bool:
        """Return whether a process is monitored and its heartbeat is not overdue.

        Args:
            rank: rank of the process.
        """
        return rank in self._lives and not self.frozen(rank)

    def waited_s(self, ranks: Iterable[int]) -> float:
        """Return the seconds since the last of these processes began to wait without progress; 0 if any is not waiting.

        Args:
            ranks: ranks of the processes; for a rank that is not monitored, the result is 0.
        """
        since = [None if (life := self._lives.get(rank)) is None else life.waits_since for rank in ranks]
        begun = [at for at in since if at is not None]
        return self._clock() - max(begun) if begun and len(begun) == len(since) else 0.0

    def news(self, name: Callable[[int], str] = "rank {}".format) -> str | None:
        """Return a report on an unusually long pause, and a further report when the pause has doubled; else None.

        Args:
            name: returns the name of a process by its rank.
        """
        now = self._clock()
        last = min((self._lives[rank] for rank in self._suspects()), key=lambda life: life.since, default=None)
        if last is None or now - last.since < max(self._learned, 2 * last.reported_s):
            return None
        last.reported_s = now - last.since
        places = [
            (name(rank), life.waits_since is not None, life.where)
            for rank, life in sorted(self._lives.items())
            if life.where
        ]
        return pause_report(last.reported_s, self._longest, places)

    @property
    def _learned(self) -> float:
        return learned_limit(self._longest)

    def _suspects(self) -> set[int]:
        """Return the suspected stragglers: the processes with the least progress, without waiting ones if possible."""
        begun = {rank: life for rank, life in self._lives.items() if life.reached}
        least = min((life.reached for life in begun.values()), default=0)
        last = {rank for rank, life in begun.items() if life.reached == least}
        busy = {rank for rank in last if begun[rank].waits_since is None}
        return busy or last
