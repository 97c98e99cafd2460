"""Leases of the data order: each part is trained once, at any speed of workers and after any death."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import final

from fabricx.parameter_server.wire.messages import LeaseReply


@final
class Leases:
    """The leases of a section, granted to workers on request.

    A section is the data between two meetings of all workers. It consists of global batches, and a global batch of
    parts. A lease is the right of a worker to train a part; both have the same number. The clock of a part is the
    number of the global batch.

    A part can be granted while at most `bound` earlier batches are incomplete. An update is therefore the gradient of
    all samples of its batch, whichever workers have computed the parts, and there is an update per batch. With
    `by_worker`, the bound is that of Ho et al. (NIPS 2013): the clock of a worker is the number of parts that it has
    completed, at most `bound` more than the clock of the slowest worker.

    Args:
        section: number of the section.
        count: number of parts.
        workers: numbers of the present workers.
        clock: number of the first global batch.
        bound: see above; None for no bound.
        by_worker: count clocks by worker.
        parts: parts of a global batch; by default the number of workers.
        single: a worker holds at most one part, and receives none while it rests.

    Attributes:
        count: see Args; `close` reduces it.
        lead: largest number of clocks by which a worker was ahead.
        resting: workers that have completed their part of an update that is still incomplete.
    """

    def __init__(
        self, section: int, count: int, workers: Iterable[int], *,
        clock: int = 0, bound: int | None = None, by_worker: bool = False, parts: int | None = None,
        single: bool = False,
    ) -> None:  # fmt: skip
        self.section = section
        self.count = count
        self.lead = 0
        self._completed = dict.fromkeys(workers, 0)  # worker -> number of parts that it has completed
        self._parts = len(self._completed) if parts is None else parts
        self._single = single
        self.resting: set[int] = set()
        self._by_worker = by_worker
        self._clock = clock
        self._bound = bound
        self._next = 0  # first part that was never granted
        self._returned: list[int] = []  # heap of parts to grant again
        self._holders: dict[int, int] = {}  # part -> worker that trains it
        self._incomplete: dict[int, int] = {}  # global batch -> number of incomplete parts

    @property
    def workers(self) -> Collection[int]:
        """Return the numbers of the present workers."""
        return self._completed.keys()

    @property
    def over(self) -> bool:
        """Return whether every part is complete."""
        return not self._holders and not self._returned and self._next >= self.count

    def holder(self, lease: int) -> int | None:
        """Return the worker that holds a part; None if no worker does.

        Args:
            lease: number of the part.
        """
        return self._holders.get(lease)

    def awaited(self) -> bool:
        """Return whether a worker that is not resting holds a part or can receive a part."""
        others = self._completed.keys() - self.resting
        remaining = bool(self._returned) or self._next < self.count
        return bool(others) and (remaining or any(worker in others for worker in self._holders.values()))

    def available(self, worker: int) -> bool:
        """Return whether a worker can receive a part now.

        Args:
            worker: number of the worker.
        """
        if worker in self.resting or (self._single and worker in self._holders.values()):
            return False
        if self._returned:
            return True
        if self._next >= self.count:
            return False
        return self._bound is None or self._ahead(worker) <= self._bound

    def grant(self, worker: int) -> LeaseReply:
        """Grant a worker the next part, if the worker can receive it.

        Args:
            worker: number of the worker.
        """
        if not self.available(worker):
            return LeaseReply(None, over=self.over, count=self.count)
        if again := bool(self._returned):
            lease = heapq.heappop(self._returned)
        else:
            lease, self._next = self._next, self._next + 1
        batch = lease // self._parts
        parts = min(self._parts, self.count - batch * self._parts)
        self._incomplete.setdefault(batch, parts)
        self.lead = max(self.lead, self._ahead(worker, batch))
        self._holders[lease] = worker
        return LeaseReply(lease, self._clock + batch, parts, again=again)

    def done(self, lease: int) -> None:
        """Mark a part as complete; parts that a different server has granted are ignored.

        Args:
            lease: number of the part.
        """
        if lease not in self._holders:
            return
        worker = self._holders.pop(lease)
        if worker in self._completed:
            self._completed[worker] += 1
        batch = lease // self._parts
        self._incomplete[batch] -= 1
        if not self._incomplete[batch]:
            del self._incomplete[batch]

    def take_back(self, lease: int) -> None:
        """Make a part available again; it will be granted to the next worker that requests a part.

        Args:
            lease: number of the part.
        """
        if self._holders.pop(lease, None) is not None:
            heapq.heappush(self._returned, lease)

    def remove_worker(self, worker: int) -> None:
        """Remove a worker, and make the parts that it holds available again.

        Args:
            worker: number of the worker.
        """
        self._completed.pop(worker, None)
        for lease in [lease for lease, holder in self._holders.items() if holder == worker]:
            self.take_back(lease)

    def add_worker(self, worker: int) -> None:
        """Add a worker, which can receive parts from now on.

        Args:
            worker: number of the worker.
        """
        self._completed.setdefault(worker, min(self._completed.values(), default=0))

    def close(self) -> None:
        """Grant no new parts, except those that complete an update; the section ends when all are complete.

        Updates of single parts, and those with backup workers, need no further part. A worker may be unable to receive
        one, since it rests or since another worker, which takes no part in the section, keeps it within the bound.
        """
        parts = 1 if self._single or self._by_worker else self._parts
        self.count = min(self.count, -(-self._next // parts) * parts)

    def _ahead(self, worker: int, batch: int | None = None) -> int:
        """Return by how many clocks a worker would be ahead if it began a part."""
        if self._by_worker:
            return self._completed.get(worker, 0) - min(self._completed.values(), default=0)
        return (self._next // self._parts if batch is None else batch) - self._oldest()

    def _oldest(self) -> int:
        """Return the number of the first incomplete batch."""
        return min(self._incomplete, default=self._next // self._parts)


@final
class LeaseSet:
    """A set of leases of a section that is stored compactly: all leases below a number, and a few above."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def __contains__(self, lease: int) -> bool:
        return lease < self._below or lease in self._above

    def add(self, lease: int) -> None:
        """Add a lease.

        Args:
            lease: number of the lease.
        """
        self._above.add(lease)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
