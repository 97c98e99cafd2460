"""The supervisor's membership state machine: deaths, replacements, and the next generation."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from fabricx.distributed.membership.generations import Generation, WorkerMessage

SETTLE_S: Final = 0.05  # wait for a notice of a death after connections broke


@dataclass(frozen=True)
class ElasticPolicy:
    """Rules of recovery in place.

    Attributes:
        waits: seconds for which the survivors wait for a replacement. Then they continue, at once with 0, and the
            replacement joins them later.
        least: minimum number of workers to continue with.
        tries: maximum number of consecutive failed generations without a further step in between, and of consecutive
            workers that end before they have joined (at least 1, so that the number of workers can be changed).
        outlived: in-memory checkpoints outlive the workers, so that no worker has to survive.
        fixed: the number of workers can't change: the survivors wait for replacements.
    """

    waits: float = 0.0
    least: int = 1
    tries: int = 10
    outlived: bool = False
    fixed: bool = False


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
        self._left: set[int] = set()  # workers that have left this generation and wait for the next
        self._fixed = ""  # why the workers can't change; "" if they can
        self._devices = {worker: worker for worker in range(size)}  # device number of each worker
        self._coming: set[int] = set()  # replacements that are starting
        self._replacements: dict[int, tuple[int, ...]] = {}  # as in Generation
        self._lost: list[tuple[int, tuple[int, ...]]] = []  # as Generation.departed
        self._settled = 0  # as in Generation
        self._ready: list[int] = []  # replacements that wait to join, in order of arrival
        self._since = 0.0  # time of the first event that is not settled
        self._broken = False  # a next generation is needed
        self._over = -1  # newest generation of which the members were informed that it is over
        self._departed: tuple[int, ...] = ()  # workers that the present generation does not need any more
        self._outbox: list[tuple[tuple[int, ...], str, Any]] = []
        self._step, self._tries = -1, 0  # tries: failed generations without a further step
        self._failed_starts = 0  # workers that ended before they had joined, since a member died or a worker joined
        self._repeats = False  # workers repeat a step, and none has reported a further step
        self._cuts: list[str] = []  # records of lost links since all members trained, which a failure may explain

    # -- events -------------------------------------------------------------------------------------------------

    def receive(self, worker: int, kind: str, content: Any) -> None:
        """Process a message of a worker.

        Args:
            worker: sender.
            kind: a `WorkerMessage`, which describes the content.
            content: content of the message.
        """
        if kind == WorkerMessage.CAN_RECOVER:
            self._inside.add(worker)
            self._holding.add(worker)
            self._arrived.add(worker)
        elif kind == WorkerMessage.SIZE_FIXED:
            self._fixed, recovers = content
            self._size = len(self._seats)  # workers that were requested before are dismissed
            if not recovers:
                self._holding.add(worker)
                self._arrived.add(worker)
        elif kind == WorkerMessage.CANNOT_RECOVER:
            self._inside.discard(worker)
            self._ended.add(worker)
            stateless = [other for other in self._seats if other not in self._holding and other not in self._dead]
            self._seats = [other for other in self._seats if other not in stateless]
            self._dismiss([*stateless, *self._ready])  # the run ends before they could train
        elif kind == WorkerMessage.READY:
            self._coming.discard(worker)
            self._ready.append(worker)
            if self._ended:  # no further generation begins
                self._dismiss([worker])
        elif kind == WorkerMessage.LINKS_CUT:
            generation, why = content
            if self._begin_again(worker, generation, f"lost its links: {why}"):
                self._cuts.append(self._failures[-1])
        elif kind == WorkerMessage.REPEAT:
            self._begin_again(worker, *content)
        elif kind == WorkerMessage.LEFT:
            self._end(content)  # for workers that join; members leave after different steps, and may wait for this one
            if content == self._number:
                self._left.add(worker)
        else:
            assert kind == WorkerMessage.STEP, kind
            generation, step = content
            joins = generation == self._number and worker not in self._arrived  # it reports the step that it repeats
            self._holding.add(worker)
            self._settled = max(self._settled, generation)
            self._lost = [(since, workers) for since, workers in self._lost if since > self._settled]
            if generation == self._number:
                self._arrived.add(worker)
                if not self._broken and self._arrived.issuperset(self._seats):
                    self._cuts.clear()
            if step > self._step:
                if not joins:
                    self._tries = 0
                elif self._repeats:  # a further step was made before the newest failure, but not reported
                    self._tries = min(self._tries, 1)
                self._step, self._repeats = step, joins

    def _begin_again(self, worker: int, generation: int, why: str) -> bool:
        """Record a failure and request a new generation; returns False if no new generation is possible or needed."""
        if generation != self._number or worker not in self._seats or self._broken:
            return False
        if self.exhausted:  # no message: the worker raises its error
            return False
        self._failures.append(f"rank {self._seats.index(worker)} {why}")
        self._break()
        return True

    def explain_cuts(self) -> None:
        """Remove the records of lost links since all members trained: a failure that is recorded now has cut them."""
        for record in self._cuts:
            self._failures.remove(record)
        counted = max(0, len(self._cuts) - self._broken)  # the next generation will be counted
        self._tries = max(0, self._tries - counted)
        self._cuts.clear()

    def died(self, worker: int, why: str) -> bool:
        """Record a death.

        Args:
            worker: worker that has died.
            why: its error or exit status.

        Returns:
            whether the other workers can continue.
        """
        if self._died_early(worker):
            return not self.stuck
        if worker not in self._seats:
            return True
        survivors = tuple(other for other in self.workers if other != worker)
        if worker in self._ended and worker != self._seats[0]:  # it had finished
            self._dead.add(worker)
            return True
        self.explain_cuts()
        if self._elastic.outlived:
            able = not self._ended and (self._number > 0 or worker in self._holding)
        else:
            begun = self._number > 0 or worker in self._holding  # otherwise its initial random state is lost
            able = begun and not self._holding.isdisjoint(survivors) and len(survivors) >= self._elastic.least
        if not able or not self._inside.issuperset(survivors) or self.exhausted:
            return False
        self._failures.append(f"rank {self._seats.index(worker)} failed: {why}")
        self._failed_starts = 0
        self._inside.discard(worker)
        self._dead.add(worker)
        self._break()
        return True

    def could_not_join(self, worker: int, why: str) -> bool:
        """Record an error of a worker before it joined, and print it.

        Args:
            worker: worker that has failed.
            why: traceback.

        Returns:
            whether the worker had not joined yet; otherwise nothing is recorded.
        """
        if not self._died_early(worker) or self.stuck:
            return False
        print(f"a worker could not join:\n{why}", file=sys.stderr)
        return True

    @property
    def _keeps_size(self) -> bool:
        """Return whether the number of workers can't change."""
        return self._elastic.fixed or bool(self._fixed)

    @property
    def _enough(self) -> bool:
        """Return whether as many workers as a generation needs can begin it."""
        needed = self._size if self._keeps_size else max(1, self._elastic.least)
        return len(self.workers) + len(self._ready) >= needed

    def _died_early(self, worker: int) -> bool:
        early = worker in self._coming or worker in self._ready
        self._coming.discard(worker)
        if worker in self._ready:
            self._ready.remove(worker)
        self._failed_starts += early
        return early

    def _break(self) -> None:
        if not self._broken:
            self._since = self._clock()
        self._broken = True
        self._end(self._number)

    def _end(self, generation: int) -> None:
        """Inform the workers that a generation is over, so that no worker waits for a worker that has left it."""
        if generation > self._over:
            self._over = generation
            self._outbox.append(((*self.workers, *self._departed), "broken", generation))

    def resize(self, workers: int) -> str:
        """Change the number of workers.

        Args:
            workers: new number of workers.

        Returns:
            the answer for the user.
        """
        if workers < self._elastic.least:
            return f"{workers} workers are too few: min_ranks={self._elastic.least}; request as many, or more"
        if self._elastic.fixed and workers != self._size:
            return (
                f"this strategy divides the model over {self._size} workers, and their number can't change during a "
                "run: stop it, and resume with other devices"
            )
        if self._fixed:
            return (
                f"{self._fixed}: the number of workers can't change during the run. With a map-style data set that "
                "fabricx divides, it can"
            )
        if self._ended:
            return "the number of workers can't be changed any more: the run ends"
        self._size, self._failed_starts = workers, 0
        return f"{workers} worker{'s' if workers != 1 else ''} from now on"

    # -- decisions ----------------------------------------------------------------------------------------------

    @property
    def missing(self) -> frozenset[int]:
        """Return the dead workers of the present generation."""
        return frozenset(self._dead)

    def rank_of(self, worker: int) -> int | None:
        """Return the newest rank of a worker; None if it has never been a member.

        Args:
            worker: any number.
        """
        return self._ranks.get(worker)

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the living members, by rank."""
        return tuple(worker for worker in self._seats if worker not in self._dead)

    @property
    def settled(self) -> bool:
        """Return whether all members of the present generation train."""
        return self.intact and self._arrived.issuperset(self._seats)

    @property
    def exhausted(self) -> bool:
        """Return whether recovery has ended because each try has failed at the same step, one after the other."""
        return self._tries >= self._elastic.tries

    @property
    def stuck(self) -> str:
        """Return why the run can't continue after a death that the other workers have survived; "" if it can."""
        if self._ended:
            if not self._dead.isdisjoint(self._seats[:1]):
                return "the training has ended, and its results are lost"
            return "other ranks have ended the training" if self._left - self._ended - self._dead else ""
        waits = self._broken and not self._enough and not self._coming and self.wanted() is None
        return "too few workers are left, and no replacement can start" if waits else ""

    @property
    def intact(self) -> bool:
        """Return whether no member of the present generation has died or lost its connections."""
        return not self._broken and not self._dead

    def wanted(self) -> int | None:
        """Return the rank for which a worker is to be started; None if no worker is needed."""
        coming = len(self._coming) + len(self._ready)
        failing = self._failed_starts >= max(1, self._elastic.tries)
        if self._ended or failing or coming >= self._size - len(self.workers):
            return None
        empty = [rank for rank, worker in enumerate(self._seats) if worker in self._dead]
        return empty[coming] if coming < len(empty) else len(self.workers) + coming

    def started(self, worker: int) -> int:
        """Record the start of a worker; returns the number of its device, which no other worker uses.

        A rank changes when workers leave, and the device does not.

        Args:
            worker: number of the worker.
        """
        used = {self._devices[other] for other in (*self.workers, *self._coming, *self._ready)}
        self._devices[worker] = next(number for number in itertools.count() if number not in used)
        self._coming.add(worker)
        return self._devices[worker]

    def due(self) -> float:
        """Return the seconds until `messages` has to be called again without an event; at most 1."""
        return min(1.0, max(0.0, self._since + self._patience() - self._clock())) if self._broken else 1.0

    def messages(self) -> Iterator[tuple[tuple[int, ...], str, Any]]:
        """Yield the messages to send now: (workers, kind, content)."""
        complete = bool(self._dead) and len(self.workers) + len(self._ready) >= self._size
        if self._ended:
            pass
        elif self._broken:
            if complete or (self._enough and self._clock() - self._since >= self._patience()):
                self._begin_generation()
        elif self._arrived.issuperset(self.workers):
            more = max(0, self._size - len(self.workers))
            self._dismiss(self._ready[more:])
            if self._ready or len(self.workers) > self._size:
                self._begin_generation(leaving=self.workers[self._size :])
        yield from self._outbox
        self._outbox.clear()

    def _patience(self) -> float:
        """Return the seconds to wait from an event to the next generation; 0 if no replacement will start."""
        comes = bool(self._coming) or self.wanted() is not None
        return self._elastic.waits if self._dead and comes else SETTLE_S

    def _state_slots(self, worker: int) -> tuple[int, ...]:
        """Return the slots with the state of a dead worker: with those of its predecessors, if it had not loaded it."""
        return (worker,) if worker in self._holding else (worker, *self._replacements.get(worker, ()))

    def _dismiss(self, surplus: list[int]) -> None:
        """End replacements that are not needed any more."""
        if surplus:
            self._outbox.append((tuple(surplus), "leave", None))
            self._ready = [worker for worker in self._ready if worker not in surplus]

    def _begin_generation(self, leaving: tuple[int, ...] = ()) -> None:
        """Begin the next generation; waiting workers replace dead members first, and then become additional members."""
        seats, replacements, departed = [], {}, []
        self._failed_starts = 0 if self._ready else self._failed_starts
        self._number += 1
        self._tries += self._broken
        for worker in self._seats:
            if worker in leaving:
                departed.append(worker)
                self._lost.append((self._number, (worker,)))
            elif worker not in self._dead:
                seats.append(worker)
                if worker in self._replacements and worker not in self._holding:  # it has not loaded the state yet
                    replacements[worker] = self._replacements[worker]
            elif self._ready:
                replacement = self._ready.pop(0)
                replacements[replacement] = self._state_slots(worker)
                seats.append(replacement)
            else:
                departed.append(worker)
                self._lost.append((self._number, self._state_slots(worker)))
        self._dismiss(self._ready[max(0, self._size - len(seats)) :])
        self._inside.update(replacements, self._ready)
        self._seats = [*seats, *self._ready]
        self._ranks |= {worker: rank for rank, worker in enumerate(self._seats)}
        whole, self._departed = not self._dead, tuple(departed)
        self._dead.clear()
        self._ready.clear()
        self._arrived.clear()
        self._left.clear()
        self._broken = False
        self._replacements = replacements
        generation = Generation(
            self._number, self.workers, replacements, tuple(self._lost), whole, tuple(self._failures), self._settled
        )
        self._outbox.append(((*self.workers, *self._departed), "generation", generation))  # departed workers end
