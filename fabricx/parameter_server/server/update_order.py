"""Order of updates that bounds the staleness."""

from __future__ import annotations

from typing import final


@final
class UpdateOrder:
    """Order of the workers that compute a gradient at present: an update waits if it would break the staleness bound.

    A worker has a place in the order from its pull (`record_pull`) until its push (`record_push`) or its end
    (`remove`). Unless `ordered`, every condition is true.

    With several servers, updates take turns at the server that grants the leases, before they are pushed to any server.
    Workers pull weights from the other servers afterwards, and push to them before, so the staleness on these servers
    is at most that on the granting server.

    Args:
        ordered: updates wait for each other.
        bound: maximum staleness, in updates.
    """

    def __init__(self, *, ordered: bool = False, bound: int = 0) -> None:
        self._ordered, self._bound = ordered, bound
        self._bases: dict[int, int] = {}  # worker -> version of the weights with which it computes
        self._turn: int | None = None  # worker with the next update; None for any worker

    def record_pull(self, worker: int, version: int) -> None:
        """Record that a worker has received weights and computes.

        Args:
            worker: number of the worker.
            version: version of the weights.
        """
        self._bases[worker] = version

    def remove(self, worker: int) -> None:
        """Remove a worker; should it reconnect, its gradient is not used, because its lease was made available again.

        Args:
            worker: number of the worker.
        """
        self._bases.pop(worker, None)
        self._end_turn(worker)

    def has_place(self, worker: int) -> bool:
        """Return whether a worker has a place in the order, so that the bound includes its gradient.

        A worker that has disconnected since it received its weights has none: its gradient must not be used.

        Args:
            worker: number of the worker.
        """
        return not self._ordered or worker in self._bases

    def take_turn(self, worker: int) -> None:
        """Reserve the next update for a worker.

        Args:
            worker: number of the worker.
        """
        self._turn = worker

    def record_push(self, worker: int) -> int | None:
        """Record a worker's push; returns the version of its weights, if known.

        Args:
            worker: number of the worker.
        """
        self._end_turn(worker)
        return self._bases.pop(worker, None)

    def may_begin(self, worker: int) -> bool:
        """Return whether a worker may receive weights: at most bound + 1 workers compute.

        Args:
            worker: number of the worker.
        """
        return not self._ordered or len(self._bases.keys() - {worker}) <= self._bound

    def may_take_turn(self, worker: int, version: int) -> bool:
        """Return whether a worker's update may be the next.

        Args:
            worker: number of the worker.
            version: present version of the weights.
        """
        return self._turn in (None, worker) and self.may_push(worker, version)

    def may_push(self, worker: int, version: int) -> bool:
        """Return whether a worker's update keeps the staleness of all computing workers within the bound.

        Workers can always push in the order in which they have received weights: the i-th (from 0) then has the
        staleness version + i - base. At most bound + 1 workers compute, so this is initially within the bound; a worker
        waits if its update would move an earlier worker beyond the bound. The first worker never waits; nor does a
        worker outside of the order, whose gradient makes no update.

        Args:
            worker: number of the worker.
            version: present version of the weights.
        """
        if not self._ordered or worker not in self._bases:
            return True
        for position, (other, base) in enumerate(sorted(self._bases.items(), key=lambda item: item[1])):
            if other == worker:
                return True
            if version + 1 + position - base > self._bound:
                return False
        return True

    def _end_turn(self, worker: int) -> None:
        if self._turn == worker:
            self._turn = None
