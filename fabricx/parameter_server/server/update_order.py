"""The order of updates that keeps staleness below its bound."""

from __future__ import annotations

from typing import final


@final
class UpdateOrder:
    """The workers that compute a gradient, with the versions of their weights.

    With several servers, updates wait for their turn at the server that deals the leases, before they are brought to
    any. The other servers are asked for weights after it, and get each update before it: a gradient is at most as
    stale as there.

    Args:
        ordered: updates wait here for each other.
        bound: the largest staleness, in updates.
    """

    def __init__(self, *, ordered: bool = False, bound: int = 0) -> None:
        self._ordered, self._bound = ordered, bound
        self._bases: dict[int, int] = {}  # version of the weights with which a worker computes
        self._turn: int | None = None  # the worker whose update is next; None for any

    def begins(self, worker: int, version: int) -> None:
        """Note that a worker has the weights of a version, and computes."""
        self._bases[worker] = version

    def base(self, worker: int) -> int | None:
        """Return with which version a worker computes; None if that is not known."""
        return self._bases.get(worker)

    def left(self, worker: int) -> None:
        """Forget a worker. Should it come back, its gradient is of a lease that is dealt again."""
        self._bases.pop(worker, None)
        self._end_turn(worker)

    def has_place(self, worker: int) -> bool:
        """Return whether the others wait for this worker's gradient where that is necessary for the bound.

        They do not, if it was away since it had the weights: its gradient must not be used.
        """
        return not self._ordered or worker in self._bases

    def take_turn(self, worker: int) -> None:
        """Let no other update come before that of a worker."""
        self._turn = worker

    def pushed(self, worker: int) -> int | None:
        """Note that a worker's gradient has come; returns the version that it was computed with, if that is known."""
        self._end_turn(worker)
        return self._bases.pop(worker, None)

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may compute now: at most bound + 1 do."""
        return not self._ordered or len(self._bases.keys() - {worker}) <= self._bound

    def may_take_turn(self, worker: int, version: int) -> bool:
        """Return whether a worker's update may be the next, at a version of the weights."""
        return self._turn in (None, worker) and self.may_push(worker, version)

    def may_push(self, worker: int, version: int) -> bool:
        """Return whether a worker's update would make no gradient that is being computed too old.

        Workers that compute can push in the order in which they have got their weights: the i-th (from 0) is then stale
        by version + i - base. No more than bound + 1 compute, so that this is within the bound at first; and an early
        worker waits if its update would bring one ahead of it beyond. The first never waits; nor does a worker without
        a place in that order, whose gradient makes no update.
        """
        if not self._ordered or worker not in self._bases:
            return True
        for place, (other, base) in enumerate(sorted(self._bases.items(), key=lambda item: item[1])):
            if other == worker:
                return True
            if version + 1 + place - base > self._bound:
                return False
        return True

    def _end_turn(self, worker: int) -> None:
        if self._turn == worker:
            self._turn = None
