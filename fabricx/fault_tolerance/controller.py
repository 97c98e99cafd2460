"""The supervisor's membership state machine: deaths, replacements, and the next generation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from fabricx.distributed.generations import Generation

SETTLE_S: Final = 0.05  # wait for a notice of a death after connections broke


@dataclass(frozen=True)
class ElasticPolicy:
    """Rules of recovery in place.

    Attributes:
        waits: seconds for which the survivors wait for a replacement. Then they continue, at once with 0, and the
            replacement joins them later.
        least: minimum number of workers to continue with.
        tries: maximum number of consecutive deaths without a step in between.
        outlived: in-memory checkpoints outlive the workers, so that no worker has to survive.
    """

    waits: float = 0.0
    least: int = 1
    tries: int = 10
    outlived: bool = False


@final
class ElasticController:
    """State machine of membership, without processes or pipes: events in, messages to workers out.

    Args:
        elastic: rules of recovery.
        size: number of workers at the start.
        failures: list to which a description of each survived failure is appended.
        clock: seconds.
    """

    def __init__(
        self, elastic: ElasticPolicy, size: int, failures: list[str], clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._seats = list(range(size))  # members of this generation, by rank
        self._ranks = {worker: worker for worker in range(size)}  # newest rank of each worker
        self._dead: set[int] = set()  # dead members of this generation
        self._elastic, self._size, self._failures, self._clock = elastic, size, failures, clock
        self._number = 0
        self._inside: set[int] = set()  # workers that can join another generation
        self._holding: set[int] = set()  # workers that have the state of the run
        self._arrived: set[int] = set()  # workers that train in this generation
        self._ended: set[int] = set()  # workers that have finished training
        self._coming: set[int] = set()  # replacements that are starting
        self._heirs: dict[int, tuple[int, ...]] = {}  # as in Generation
        self._lost: list[tuple[int, tuple[int, ...]]] = []  # as Generation.gone
        self._settled = 0  # as in Generation
        self._ready: list[int] = []  # replacements that wait to join, in order of arrival
        self._since = 0.0  # time of the first event that is not settled
        self._broken = False  # a next generation is needed
        self._to_tell: list[tuple[tuple[int, ...], str, Any]] = []
        self._step, self._tries = -1, 0

    # -- what has happened --------------------------------------------------------------------------------------

    def told(self, worker: int, kind: str, content: Any) -> None:
        """Take a message of a worker.

        Args:
            worker: whose.
            kind: "inside", "outside" (it can or can't go on in another generation from now on), "ready" (it is to be
                let in), "cut" (it has lost its links, in the generation `content`), "again" (all are to begin again;
                `content` is the generation, and why), or "step" (`content` is the generation in which it trains, and
                from which step on).
        """
        if kind == "inside":
            self._inside.add(worker)
            self._holding.add(worker)
            self._arrived.add(worker)
        elif kind == "outside":
            self._inside.discard(worker)
            self._ended.add(worker)
            came = [other for other in self._seats if other not in self._holding and other not in self._dead]
            self._seats = [other for other in self._seats if other not in came]
            self._send_away([*came, *self._ready])  # it is too late for them
        elif kind == "ready":
            self._coming.discard(worker)
            self._ready.append(worker)
        elif kind == "cut":
            self._begin_again(worker, content, "lost its links")
        elif kind == "again":
            self._begin_again(worker, *content)
        elif kind == "step":
            generation, step = content
            self._holding.add(worker)
            self._settled = max(self._settled, generation)
            self._lost = [(since, left) for since, left in self._lost if since > self._settled]
            if generation == self._number:
                self._arrived.add(worker)
            if step > self._step:
                self._step, self._tries = step, 0

    def _begin_again(self, worker: int, generation: int, why: str) -> None:
        if generation != self._number or worker not in self._seats or self._broken:
            return
        self._tries += 1
        if self._tries <= self._elastic.tries:  # else it is told nothing, and raises what it has
            self._failures.append(f"rank {self._seats.index(worker)} {why}")
            self._break()

    def died(self, worker: int, why: str) -> bool:
        """Note a death; returns whether the others can go on."""
        if self._gone_early(worker) or worker not in self._seats:
            return True
        left = tuple(other for other in self.workers if other != worker)
        if worker in self._ended and worker != self._seats[0]:  # it had nothing left to do
            self._dead.add(worker)
            return True
        self._tries += 1
        if self._elastic.outlived:
            able = not self._ended and (self._number > 0 or worker in self._holding)
        else:
            begun = self._number > 0 or worker in self._holding  # else what it would have drawn at the start is lost
            able = begun and not self._holding.isdisjoint(left) and len(left) >= self._elastic.least
        if not able or not self._inside.issuperset(left) or self._tries > self._elastic.tries:
            return False
        self._failures.append(f"rank {self._seats.index(worker)} failed: {why}")
        self._inside.discard(worker)
        self._dead.add(worker)
        self._break()
        return True

    def could_not_join(self, worker: int, why: str) -> bool:
        """Note an error of a worker that others don't know yet; returns whether it was one."""
        if not self._gone_early(worker):
            return False
        print(f"a worker could not join:\n{why}", file=sys.stderr)
        return True

    def _gone_early(self, worker: int) -> bool:
        early = worker in self._coming or worker in self._ready
        self._coming.discard(worker)
        if worker in self._ready:
            self._ready.remove(worker)
        self._tries += early
        return early

    def _break(self) -> None:
        if not self._broken:
            self._since = self._clock()
        self._broken = True
        self._to_tell.append((self.workers, "broken", self._number))

    def resize(self, workers: int) -> str:
        """Let there be so many workers from now on; returns what to say of it."""
        if workers < self._elastic.least:
            return f"{workers} workers are too few: min_ranks={self._elastic.least}"
        if self._ended or not self._inside.issuperset(self.workers):
            return "workers can't be changed now: the run begins or ends"
        self._size = workers
        return f"{workers} worker{'s' if workers != 1 else ''} from now on"

    # -- what comes of it ---------------------------------------------------------------------------------------

    @property
    def missing(self) -> frozenset[int]:
        """Return who died, and the others haven't gone on since."""
        return frozenset(self._dead)

    def rank_of(self, worker: int) -> int | None:
        """Return the rank that a worker has, or had last; None for one that has never been a member."""
        return self._ranks.get(worker)

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the members that are alive, by rank."""
        return tuple(worker for worker in self._seats if worker not in self._dead)

    @property
    def settled(self) -> bool:
        """Return whether all members have gone on since somebody has died."""
        return not self._broken and not self._dead and self._arrived.issuperset(self._seats)

    def wanted(self) -> int | None:
        """Return for which rank another worker is to be started, if for any."""
        coming = len(self._coming) + len(self._ready)
        if self._ended or self._tries > self._elastic.tries or coming >= self._size - len(self.workers):
            return None
        empty = [rank for rank, worker in enumerate(self._seats) if worker in self._dead]
        return empty[coming] if coming < len(empty) else len(self.workers) + coming

    def started(self, worker: int) -> None:
        """Note that it was."""
        self._coming.add(worker)

    def due(self) -> float:
        """Return in how many seconds there may be news though nothing happens, 1 at most."""
        return min(1.0, max(0.0, self._since + self._patience() - self._clock())) if self._broken else 1.0

    def news(self) -> Iterator[tuple[tuple[int, ...], str, Any]]:
        """Yield what is to be told now: to whom, and a message."""
        complete = bool(self._dead) and len(self.workers) + len(self._ready) >= self._size
        if self._ended:
            pass
        elif self._broken:
            enough = len(self.workers) + len(self._ready) >= max(1, self._elastic.least)
            if complete or (enough and self._clock() - self._since >= self._patience()):
                self._go_on()
        elif self._arrived.issuperset(self.workers):
            more = max(0, self._size - len(self.workers))
            self._send_away(self._ready[more:])
            if self._ready or len(self.workers) > self._size:
                self._go_on(leaving=self.workers[self._size :])
        yield from self._to_tell
        self._to_tell.clear()

    def _patience(self) -> float:
        return self._elastic.waits if self._dead else SETTLE_S

    def _left_by(self, worker: int) -> tuple[int, ...]:
        """Return the workers whose slots have a dead worker's state: also its predecessors until it has taken over."""
        return (worker,) if worker in self._holding else (worker, *self._heirs.get(worker, ()))

    def _send_away(self, surplus: list[int]) -> None:
        """Let those end that came and aren't wanted any more."""
        if surplus:
            self._to_tell.append((tuple(surplus), "leave", None))
            self._ready = [worker for worker in self._ready if worker not in surplus]

    def _go_on(self, leaving: tuple[int, ...] = ()) -> None:
        """Begin the next generation; whoever comes takes the place of one that died, while there are such."""
        seats, heirs, gone = [], {}, []
        self._number += 1
        for worker in self._seats:
            if worker in leaving:
                gone.append(worker)
                self._lost.append((self._number, (worker,)))
            elif worker not in self._dead:
                seats.append(worker)
                if worker in self._heirs and worker not in self._holding:  # it has come, and has taken nothing over yet
                    heirs[worker] = self._heirs[worker]
            elif self._ready:
                heir = self._ready.pop(0)
                heirs[heir] = self._left_by(worker)
                seats.append(heir)
            else:
                gone.append(worker)
                self._lost.append((self._number, self._left_by(worker)))
        self._send_away(self._ready[max(0, self._size - len(seats)) :])
        self._inside.update(heirs, self._ready)
        self._seats = [*seats, *self._ready]
        self._ranks |= {worker: rank for rank, worker in enumerate(self._seats)}
        whole = not self._dead
        self._dead.clear()
        self._ready.clear()
        self._arrived.clear()
        self._broken = False
        self._heirs = heirs
        generation = Generation(
            self._number, self.workers, heirs, tuple(self._lost), whole, tuple(self._failures), self._settled
        )
        self._to_tell.append(((*self.workers, *gone), "generation", generation))  # who isn't named, ends
