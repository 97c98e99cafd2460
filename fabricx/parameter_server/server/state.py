"""State of a parameter server: a function of the sequence of its messages."""

from __future__ import annotations

from typing import final

from fabricx.parameter_server.server.aggregation import Aggregation, make_aggregation
from fabricx.parameter_server.server.lease_ledger import LeaseLedger
from fabricx.parameter_server.server.leases import Leases
from fabricx.parameter_server.server.model_shard import ModelShard
from fabricx.parameter_server.server.update_order import UpdateOrder
from fabricx.parameter_server.wire.messages import Counts, OpenSection, ServerInit


@final
class ServerState:
    """The parts of a server; `shard` and `updates` exist from `initialise` on.

    Args:
        workers: initial number of workers.
        grants: this server grants the leases.

    Attributes:
        counts: statistics.
        departed: numbers of the workers that have disconnected.
        ledger: leases of the data.
        order: order of updates that bounds the staleness.
        is_initialised: `initialise` was called.
        shard: weights or sums, and optimizers.
        updates: aggregation, which decides when gradients become updates.
    """

    shard: ModelShard
    updates: Aggregation

    def __init__(self, workers: int, *, grants: bool) -> None:
        self.counts = Counts()
        self.departed: set[int] = set()
        self.ledger = LeaseLedger(workers, grants=grants, counts=self.counts)
        self.order = UpdateOrder()
        self.is_initialised = False
        self._closed = -1  # newest section that a worker has closed, maybe before another worker opened it

    def initialise(self, init: ServerInit) -> None:
        """Initialise the server with weights; the leases of a section that has begun are kept.

        Args:
            init: initialisation of the server.
        """
        settings = init.settings
        self.is_initialised = True
        self.shard = ModelShard(init, self.counts)
        self.updates = make_aggregation(self.shard, self.ledger, self.counts)
        self.order = UpdateOrder(
            ordered=self.ledger.grants and settings.orders_updates, bound=settings.max_staleness or 0
        )
        self.counts.begun = init.version
        self.counts.dealt = self.counts.used = self.counts.repeated = self.counts.conflicts = 0

    def open(self, message: OpenSection) -> None:
        """Begin a section of the data, if it is new.

        Args:
            message: a worker's message; every worker sends it.
        """
        if message.section <= self.ledger.leases.section:
            return
        settings, shard = self.shard.settings, self.shard
        shard.version = max(shard.version, message.version)  # with local rounds, servers may have made other updates
        workers = self.ledger.workers if message.workers is None else set(message.workers) - self.departed
        leases = Leases(
            message.section, message.count, workers,
            clock=shard.version,
            bound=settings.max_staleness if settings.bound == "clock" else None,
            by_worker=not settings.aggregate,
            parts=settings.parts_of_update(len(workers)) if settings.aggregate else None,
            single=bool(settings.backup),
        )  # fmt: skip
        self.ledger.open(leases)
        if message.data is not None:
            shard.samples.open(*message.data)
        if message.section <= self._closed:
            self.ledger.close()

    def close(self, section: int) -> None:
        """End a section early, at once if no worker has begun it: grant no new leases, except to complete an update.

        Args:
            section: number of the section.
        """
        self._closed = max(self._closed, section)
        if section == self.ledger.leases.section:
            self.ledger.close()
            self.updates.update_without_late()

    def remove_worker(self, worker: int) -> None:
        """Remove a worker; leases for which it has pushed no gradient can be granted again.

        Args:
            worker: number of the worker.
        """
        self.departed.add(worker)
        self.order.remove(worker)
        self.ledger.leases.remove_worker(worker)
        if self.is_initialised:
            self.shard.forget_weights_of(worker)
            self.updates.update_without_late()

    def add_worker(self, worker: int, *, resumes: bool) -> None:
        """Add a worker: at once before training and when it resumes, otherwise at the next section.

        Args:
            worker: number of the worker.
            resumes: it was connected before.
        """
        ledger = self.ledger
        if not resumes and ledger.grants and ledger.is_leased and worker not in ledger.workers:
            return
        self.departed.discard(worker)
        ledger.leases.add_worker(worker)
