"""Parameter servers: workers push gradients, and pull sums of gradients or updated weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from fabricx.distributed.compression.codecs import POWERSGD
from fabricx.errors import check_choice
from fabricx.parameter_server.strategy import ServedStrategy
from fabricx.parameter_server.worker.asynchronous import Asynchronous


@final
@dataclass(kw_only=True, eq=False, repr=False)
class ParameterServer(ServedStrategy):
    """Divide the parameters by size among servers; `devices` counts the workers, and servers are additional processes.

    "sync" has the results of ddp. In "async", workers do not wait for each other: a worker requests the next batch of
    the common data order when it is ready. Every sample is trained once per epoch, and a slow worker trains fewer
    batches.

    Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; backup workers: Chen et al.,
    "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

    Args:
        mode: "sync", "bounded" (at most `max_staleness` behind) or "async".
        servers: see `ServerOptions`. 0 is possible in "sync" on a single machine, and is the fastest method: each
            worker sums a part of the gradients in shared memory. With optimizer="server" the weights are in shared
            memory, too, and each worker steps its part.
        optimizer: process that steps in "sync": "worker" (servers sum gradients) or "server" (moments exist only once).
            With "server" and in "bounded", a hook that reads gradients raises an error, because workers do not have
            the global mean. With "server", in "bounded" and in "async", a hook that changes weights raises an error,
            because the weights are on the servers.
        max_staleness: in "bounded", global batches that a worker may be ahead of the oldest incomplete global batch.
        apply: in "bounded", "aggregate" makes an update for each global batch. "arrival" makes an update for each
            gradient; `max_staleness` is then the number of batches by which a worker may be ahead of the slowest.
        backup_workers: in "sync", number of workers for which an update does not wait; servers step. A late gradient is
            dropped, and its data are trained later in the same epoch. An update is the mean over
            `devices - backup_workers` batches.
        powersgd_rank: columns of the factors of compression="powersgd", which needs optimizer="worker"; more columns
            are more accurate and slower.
        compression, compression_keep, pull_compression, snapshot_every, link, shard_by, overlap: see `ServerOptions`.

    Raises:
        ValueError: an option is unknown or out of range, or options exclude each other.
    """

    compressions = (POWERSGD,)

    mode: Literal["sync", "bounded", "async"] = "sync"
    optimizer: Literal["worker", "server"] = "worker"
    max_staleness: int = 2
    apply: Literal["aggregate", "arrival"] = "aggregate"
    backup_workers: int = 0
    powersgd_rank: int = 2

    def __post_init__(self) -> None:
        check_choice("parameter_server", "mode", self.mode, ("sync", "bounded", "async"))
        check_choice("parameter_server", "optimizer", self.optimizer, ("worker", "server"))
        check_choice("parameter_server", "apply", self.apply, ("aggregate", "arrival"))
        super().__post_init__()
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: must be 0 or more updates")
        if self.backup_workers < 0 or (self.backup_workers and (self.mode != "sync" or self.servers != 1)):
            raise ValueError(
                f"backup_workers={self.backup_workers}: must be 0 or more workers, with mode='sync' and servers=1 "
                "(several servers would drop different gradients)"
            )
        if self.powersgd_rank < 1:
            raise ValueError(f"powersgd_rank={self.powersgd_rank}: must be 1 or more columns")
        low_rank = self.compression == POWERSGD
        asynchronous = self.mode != "sync" or self.backup_workers > 0
        if low_rank and (asynchronous or self.optimizer == "server"):
            raise ValueError(
                "compression='powersgd' needs all workers in each update; set mode='sync', optimizer='worker' and "
                "backup_workers=0"
            )
        whole_batches = self.mode == "sync" or (self.mode == "bounded" and self.apply == "aggregate")
        settings = self.settings(
            compression=None if low_rank else self.compression,
            snapshot_every=self.snapshot_every if asynchronous else 0,
            backup=self.backup_workers,
            aggregate=whole_batches,
            max_staleness=self.max_staleness if self.mode == "bounded" else None,
            damp=not whole_batches,
        )
        self._design_with(
            settings,
            Asynchronous(settings) if asynchronous else None,
            servers_step=asynchronous or self.optimizer == "server",
            rank=self.powersgd_rank if low_rank else None,
        )
