"""When gradients become updates: each gradient, all parts of a global batch, or the first parts to arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from fabricx.parameter_server.gradients import Gradient, add_up, clip, merge_rows
from fabricx.parameter_server.optimizer_parts import same_groups
from fabricx.parameter_server.server.lease_ledger import LeaseLedger
from fabricx.parameter_server.server.model_shard import ModelShard
from fabricx.parameter_server.server.update_rule import damping
from fabricx.parameter_server.wire.messages import ApplyUpdate, Counts, Groups, Push

_ROUNDED: Final = 1e-9  # shares of a whole global batch add up to 1 but for rounding


@dataclass(slots=True)
class Part:
    """Gradient of a lease.

    Attributes:
        worker: number of the sender.
        push: the message.
        gradient: gradient of the lease.
        base: version of the weights with which the gradient was computed.
        outbox: vector to the worker.
    """

    worker: int
    push: Push
    gradient: Gradient
    base: int
    outbox: Tensor


class Aggregation(ABC):
    """Decides when the gradients that arrive become an update.

    Args:
        shard: the server's part of the model.
        ledger: granted leases, and those of which a gradient was received.
        counts: statistics of the server, updated in place.
    """

    def __init__(self, shard: ModelShard, ledger: LeaseLedger, counts: Counts) -> None:
        self.shard, self.ledger, self.counts = shard, ledger, counts
        self.settings = shard.settings

    @abstractmethod
    def add(self, part: Part) -> bool:
        """Add a gradient, and make all updates that are complete; returns False if the gradient is dropped.

        Args:
            part: the gradient, in a vector that the worker will overwrite.
        """

    def update_without_late(self) -> None:
        """Make an update for which no further gradient can arrive; called when a worker leaves or requests a lease."""

    def is_complete(self, clock: int) -> bool:
        """Return whether all parts of an update have arrived.

        Args:
            clock: number of the update.
        """
        return False

    def held(self, clock: int) -> Gradient:
        """Return the sum of a complete update that waits for `apply`.

        Args:
            clock: number of the update.

        Raises:
            TypeError: updates are not held.
        """
        raise TypeError(f"{type(self).__name__} holds no updates")

    def apply(self, worker: int, message: ApplyUpdate) -> None:
        """Record that a worker requests a held update; make the update when all workers have requested it.

        Args:
            worker: number of the sender.
            message: changes of the sum.

        Raises:
            TypeError: updates are not held.
        """
        raise TypeError(f"{type(self).__name__} holds no updates")

    def count(self, part: Part) -> None:
        """Count a gradient that is used in the next update.

        Args:
            part: the gradient.
        """
        staleness = self.shard.version - part.base
        self.counts.staleness[staleness] = self.counts.staleness.get(staleness, 0) + 1
        self.shard.trained += len(part.push.leases) - part.push.skipped


@final
class EachGradient(Aggregation):
    """Each gradient is an update; stale gradients are dropped, damped or compensated, according to the settings."""

    def add(self, part: Part) -> bool:
        settings, push = self.settings, part.push
        staleness = self.shard.version - part.base
        bound = settings.max_staleness if settings.bound == "version" else None
        too_old = bound is not None and staleness > bound
        if too_old and settings.on_stale == "drop":
            self.ledger.take_back(push.leases)
            return False
        if not push.empty:
            gradient = self.shard.compensate(part.worker, part.gradient, staleness)
            damps = settings.damp or (too_old and settings.on_stale == "damp")
            self.count(part)
            self.shard.update(gradient, push.groups, push.samples, damping(staleness) if damps else 1.0)
        else:
            self.shard.samples.add(push.samples)
        self.ledger.use(push.leases)
        self.ledger.done(push.leases)
        return True


class _Batches(Aggregation):
    """An update is a sum of parts, each of which is the gradient of a lease."""

    def __init__(self, shard: ModelShard, ledger: LeaseLedger, counts: Counts) -> None:
        super().__init__(shard, ledger, counts)
        self._parts: dict[int, dict[int, Part]] = {}  # clock -> lease -> part
        self._total = torch.empty(0)

    def add_parts(self, parts: Mapping[int, Part]) -> Gradient:
        """Sum parts in the order of their leases, directly into the workers' vectors if these expect the sum.

        The sum of leases is the mean of the batches that have a loss, also if these are not the whole global batch.

        Args:
            parts: parts of an update, by lease.
        """
        shard = self.shard.init.shard
        full = _with_gradient(parts)
        if not full:
            return Gradient(torch.zeros(shard.dense), frozenset(range(len(shard.pieces))))
        if self.shard.sums:
            into = [part.outbox[: shard.dense] for part in parts.values()]
        else:
            if len(self._total) != shard.dense:
                self._total = torch.zeros(shard.dense, dtype=self.shard.init.dtype)
            into = [self._total]
        if shard.dense:
            add_up([part.gradient.dense for part in full], into)
        missing = frozenset.intersection(*(part.push.missing for part in full))
        self.shard.compress_sum(into, missing)
        total = Gradient(into[0], missing, merge_rows([part.gradient.rows for part in full]))
        share = sum(part.push.share for part in full) if self.ledger.is_leased else 1.0
        return total if abs(share - 1.0) < _ROUNDED else total / max(share, 1e-12)

    def update(
        self, parts: Mapping[int, Part], total: Gradient | None = None, groups: Groups | None = None
    ) -> None:  # fmt: skip
        """Make an update of all parts.

        Args:
            parts: parts by lease.
            total: their sum; None to compute it.
            groups: hyperparameters; None for the values of the newest part.
        """
        full = _with_gradient(parts)
        for part in parts.values():
            self.ledger.use(part.push.leases)
        for part in full:
            self.count(part)
        samples = [span for part in parts.values() for span in part.push.samples]
        if not full and not self.shard.sums:
            self.shard.skip_update(samples)
            return
        gradient = self.add_parts(parts) if total is None else total
        if full:
            newest = full[-1].push
            if newest.groups is not None:
                self.counts.conflicts += not all(same_groups(part.push.groups, newest.groups) for part in full)
            for kind, pieces, limit in newest.clips:
                clip(gradient.dense, kind, self.shard.spans(pieces), limit)
            groups = groups or newest.groups
        self.shard.update(gradient, groups, samples)


@final
class WholeBatches(_Batches):
    """An update is the sum of all parts of a global batch; updates are made in the order of the batches.

    An update can be held: workers then request norms of the sum, and the last worker's `ApplyUpdate` makes the update.

    Args:
        shard: weights and optimizers of the server.
        ledger: leases, and the values logged with their gradients.
        counts: counts of updates and dropped gradients.
    """

    def __init__(self, shard: ModelShard, ledger: LeaseLedger, counts: Counts) -> None:
        super().__init__(shard, ledger, counts)
        self._held: dict[int, Gradient] = {}  # sum of the held update, by clock
        self._applied: set[int] = set()  # workers that have sent `ApplyUpdate` for the held update

    def add(self, part: Part) -> bool:
        push = part.push
        if self.ledger.is_leased and not self.shard.copies_gradients:
            part.gradient = part.gradient.clone()  # the worker's next gradient may arrive before the update
        self._parts.setdefault(push.clock, {})[push.leases[0]] = part
        while not push.hold and self.is_complete(self.shard.version):
            self.update(self._parts.pop(self.shard.version))
        self.ledger.done(push.leases[:1])
        return True

    def is_complete(self, clock: int) -> bool:
        parts = self._parts.get(clock, {})
        return bool(parts) and len(parts) >= _expected(parts)

    def held(self, clock: int) -> Gradient:
        if clock not in self._held:
            self._held = {clock: self.add_parts(self._parts[clock])}
        return self._held[clock]

    def apply(self, worker: int, message: ApplyUpdate) -> None:
        self._applied.add(worker)
        if len(self._applied) < _expected(self._parts[message.clock]):
            return
        self._applied.clear()
        total = self.held(message.clock)
        for pieces, factor in message.scales:
            for start, stop in self.shard.spans(pieces):
                total.dense[start:stop].mul_(factor)
        for pieces, limit in message.limits:
            for start, stop in self.shard.spans(pieces):
                total.dense[start:stop].clamp_(-limit, limit)
        self.update(self._parts.pop(message.clock), total, message.groups)
        self._held.clear()


@final
class FirstGradients(_Batches):
    """An update is the mean of the first gradients to arrive; later gradients are dropped (backup workers)."""

    def add(self, part: Part) -> bool:
        leases = part.push.leases[:1]
        if part.base < self.shard.version:
            self.ledger.take_back(leases)
            return False
        part.gradient = part.gradient.clone()
        self._parts.setdefault(self.shard.version, {})[leases[0]] = part
        self.ledger.done(leases)
        self.ledger.leases.resting.add(part.worker)
        self.update_without_late()
        return True

    def update_without_late(self) -> None:
        parts = self._parts.get(self.shard.version)
        if not parts:
            return
        leases = self.ledger.leases
        if len(parts) >= self.settings.parts_of_update(len(leases.workers)) or not leases.awaited():
            leases.resting.clear()
            self.update(self._parts.pop(self.shard.version))


def _expected(parts: Mapping[int, Part]) -> int:
    """Return the number of parts of an update, which each message contains."""
    return next(iter(parts.values())).push.parts


def _with_gradient(parts: Mapping[int, Part]) -> list[Part]:
    return [parts[lease] for lease in sorted(parts) if not parts[lease].push.empty]


def make_aggregation(shard: ModelShard, ledger: LeaseLedger, counts: Counts) -> Aggregation:
    """Return the aggregation of a server's settings.

    Args:
        shard, ledger, counts: see `Aggregation`.
    """
    if shard.settings.backup:
        return FirstGradients(shard, ledger, counts)
    kind = WholeBatches if shard.settings.aggregate else EachGradient
    return kind(shard, ledger, counts)
