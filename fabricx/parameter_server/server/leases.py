"""Leases of data: each part is trained once, at any speed of workers and after any death."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import final

from fabricx.parameter_server.wire.messages import Granted


@final
class Leases:
    """The parts of one section, dealt to workers that ask.

    A part of a global batch belongs to the clock of that batch. It may be begun when at most `bound` batches before it
    aren't complete. The gradient of a batch is thus that of all its samples, whoever has computed which, and the number
    of updates is that of the batches. With `each`, the bound is that of Ho et al. (NIPS 2013): a worker's clock is the
    number of parts that it has done, and at most `bound` more than the slowest worker's.

    Args:
        section: its number.
        count: parts.
        workers: those that there are, by number.
        clock: number of the first global batch.
        bound: see above; None for no bound.
        each: count by worker.
        parts: of a global batch; as many as workers if not given.
        one: a worker has one at a time, and none while it rests.

    Attributes:
        resting: workers that have done their part of an update which others haven't.
    """

    def __init__(
        self, section: int, count: int, workers: Iterable[int], *,
        clock: int = 0, bound: int | None = None, each: bool = False, parts: int | None = None, one: bool = False,
    ) -> None:  # fmt: skip
        self.section = section
        self.count = count
        self.lead = 0
        self._done = dict.fromkeys(workers, 0)
        self._parts = len(self._done) if parts is None else parts
        self._one = one
        self.resting: set[int] = set()
        self._each = each
        self._clock = clock
        self._bound = bound
        self._next = 0
        self._returned: list[int] = []
        self._with: dict[int, int] = {}  # which worker has a lease
        self._open: dict[int, int] = {}  # parts of a batch that aren't done

    @property
    def over(self) -> bool:
        """Return whether every part is done."""
        return not self._with and not self._returned and self._next >= self.count

    def holder(self, lease: int) -> int | None:
        """Return the worker that has a part; None if none has it."""
        return self._with.get(lease)

    def awaited(self) -> bool:
        """Return whether somebody who doesn't rest has a part, or may have one."""
        others = self._done.keys() - self.resting
        left = bool(self._returned) or self._next < self.count
        return bool(others) and (left or any(worker in others for worker in self._with.values()))

    def available(self, worker: int) -> bool:
        """Return whether a worker may begin a part now."""
        if worker in self.resting or (self._one and worker in self._with.values()):
            return False
        if self._returned:
            return True
        if self._next >= self.count:
            return False
        return self._bound is None or self._ahead(worker) <= self._bound

    def grant(self, worker: int) -> Granted:
        """Give a worker the next part, if one may be begun."""
        if not self.available(worker):
            return Granted(None, over=self.over, count=self.count)
        if again := bool(self._returned):
            lease = heapq.heappop(self._returned)
        else:
            lease, self._next = self._next, self._next + 1
        batch = lease // self._parts
        parts = min(self._parts, self.count - batch * self._parts)
        self._open.setdefault(batch, parts)
        self.lead = max(self.lead, self._ahead(worker, batch))
        self._with[lease] = worker
        return Granted(lease, self._clock + batch, parts, again=again)

    def done(self, lease: int) -> None:
        """Note that a part is trained; one that another server has dealt is nothing to note."""
        if lease not in self._with:
            return
        worker = self._with.pop(lease)
        if worker in self._done:
            self._done[worker] += 1
        batch = lease // self._parts
        self._open[batch] -= 1
        if not self._open[batch]:
            del self._open[batch]

    def back(self, lease: int) -> None:
        """Give a part back: somebody else will train it."""
        if self._with.pop(lease, None) is not None:
            heapq.heappush(self._returned, lease)

    def left(self, worker: int) -> None:
        """Give back all that a worker had, and wait for it no more."""
        self._done.pop(worker, None)
        for lease in [lease for lease, holder in self._with.items() if holder == worker]:
            self.back(lease)

    def joined(self, worker: int) -> None:
        """Let a worker take parts from now on."""
        self._done.setdefault(worker, min(self._done.values(), default=0))

    def close(self) -> None:
        """Give no new parts, so that the section is over when what was given is done; a batch is completed."""
        given = -(-self._next // self._parts) * self._parts
        self.count = min(self.count, given)

    def _ahead(self, worker: int, batch: int | None = None) -> int:
        """Return by how many clocks a worker that begins a part is ahead."""
        if self._each:
            return self._done.get(worker, 0) - min(self._done.values(), default=0)
        return (self._next // self._parts if batch is None else batch) - self._oldest()

    def _oldest(self) -> int:
        """Return the first batch that isn't complete."""
        return min(self._open, default=self._next // self._parts)


@final
class Brought:
    """The parts of one section whose gradients a server has, with the gaps between them."""

    def __init__(self) -> None:
        self._below = 0  # all parts before this one
        self._above: set[int] = set()

    def __contains__(self, lease: int) -> bool:
        return lease < self._below or lease in self._above

    def add(self, lease: int) -> None:
        """Note that a gradient of this part has come."""
        self._above.add(lease)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
