"""Parameter servers: workers push gradients, and pull sums of gradients or updated weights."""

from __future__ import annotations

from typing import Literal, final

from fabricx.distributed.codecs import CODECS, POWERSGD, VectorCompression
from fabricx.errors import check_choice
from fabricx.parameter_server.strategy import LinkKind, Overlap, ServedStrategy, ShardBy
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous


@final
class ParameterServer(ServedStrategy):
    """Divide the parameters by size among servers; `devices` counts the workers, and servers are additional processes.

    Results in "sync" equal those of ddp. In "async" workers do not wait for each other: each requests the next batch of
    the common data order when it is ready, so that every sample is trained once per epoch, and a slow worker trains
    fewer batches.

    Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; backup workers: Chen et al.,
    "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

    Args:
        mode: "sync", "bounded" (at most `max_staleness` behind) or "async".
        servers: server processes, among which the parameters are divided. 0, in "sync" on one machine: each worker
            sums a part of the gradients in shared memory, which is the fastest method on one machine. With
            optimizer="server" the weights are in shared memory, too, and each worker steps its part.
        optimizer: process that steps in "sync": "worker" (servers sum) or "server" (which has the only moments). If
            servers step, and in "bounded", a hook that reads gradients raises an error, because workers do not have
            the global mean. A hook that changes weights raises an error there and in "async", because servers have
            the weights.
        max_staleness: in "bounded", global batches that a worker may be ahead of the oldest incomplete global batch.
        apply: in "bounded", "aggregate" makes one update per global batch; "arrival" one per gradient, and then
            `max_staleness` bounds the number of batches by which a worker is ahead of the slowest.
        backup_workers: in "sync", workers whose gradients an update does not wait for; servers step. A late gradient
            is dropped, and its data are dealt again in the same epoch. An update is the mean of as many batches fewer.
        compression: of gradients, with error feedback: "bf16", "fp16" (half the bytes), "topk" (the largest
            `compression_keep` of the elements, 8 bytes each), "sign" (1 bit each), or, if workers step, "powersgd"
            (two low-rank factors for each large matrix).
        compression_keep: fraction of the elements that "topk" sends.
        powersgd_rank: columns of the low-rank factors; more columns are more accurate and slower.
        pull_compression: the same for the data that servers send: sums, or weight differences.
        snapshot_every: updates between two snapshots of each server. A server that dies is restarted from its newest
            snapshot and a journal of later messages, so that nothing is lost; they need the memory of 6 copies of the
            weights and 2 of the moments. 0: no snapshots; the run ends when a server dies. Not under torchrun.
        link: "auto" uses shared memory within a machine and gloo between machines; "gloo" always uses gloo.
        shard_by: "element" divides parameters among servers at any element, "tensor" keeps them whole; "auto" depends
            on the optimizers: torch's are recognised, and others are tested at set-up. One server divides nothing.
        overlap: "backward" sends gradients while `backward` is running. "forward" also pulls weights during the next
            forward, layer by layer, if servers step; callbacks between two steps then see the old weights.

    Raises:
        ValueError: an option is unknown or out of range, or options exclude each other.
    """

    def __init__(
        self,
        *,
        mode: Literal["sync", "bounded", "async"] = "sync",
        servers: int = 1,
        optimizer: Literal["worker", "server"] = "worker",
        max_staleness: int = 2,
        apply: Literal["aggregate", "arrival"] = "aggregate",
        backup_workers: int = 0,
        compression: VectorCompression | Literal["powersgd"] | None = None,
        compression_keep: float = 0.01,
        powersgd_rank: int = 2,
        pull_compression: VectorCompression | None = None,
        snapshot_every: int = 100,
        link: LinkKind = "auto",
        shard_by: ShardBy = "auto",
        overlap: Overlap = "backward",
    ) -> None:
        check_choice("parameter_server", "mode", mode, ("sync", "bounded", "async"))
        check_choice("parameter_server", "optimizer", optimizer, ("worker", "server"))
        check_choice("parameter_server", "compression", compression, (*CODECS, POWERSGD, None))
        check_choice("parameter_server", "apply", apply, ("aggregate", "arrival"))
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: must be 0 or more updates")
        if backup_workers < 0 or (backup_workers and (mode != "sync" or servers != 1)):
            raise ValueError(
                f"backup_workers={backup_workers}: must be 0 or more workers, with mode='sync' and servers=1 (several "
                "servers would drop different gradients)"
            )
        self.backup_workers = backup_workers
        apart = mode != "sync" or backup_workers > 0
        self.mode = mode
        self.optimizer = optimizer
        self.max_staleness = max_staleness
        self.apply = apply
        if powersgd_rank < 1:
            raise ValueError(f"powersgd_rank={powersgd_rank}: must be 1 or more columns")
        thin = compression == POWERSGD
        if thin and (apart or optimizer == "server"):
            raise ValueError(
                "compression='powersgd' needs all workers in each update; set mode='sync', optimizer='worker' and "
                "backup_workers=0"
            )
        self.powersgd_rank = powersgd_rank
        self.pull_compression = pull_compression
        self.overlap = overlap
        self.compression = compression
        self.snapshot_every = snapshot_every
        self.compression_keep = compression_keep
        settings = Settings(
            workers=0,
            compression=None if thin else compression,
            pull_compression=pull_compression,
            keep=compression_keep,
            snapshot_every=snapshot_every if apart else min(snapshot_every, 0),
            backup=backup_workers,
            aggregate=mode == "sync" or (mode == "bounded" and apply == "aggregate"),
            max_staleness=max_staleness if mode == "bounded" else None,
            damp=mode != "sync" and not (mode == "bounded" and apply == "aggregate"),
        )
        super().__init__(
            Asynchronous(settings) if apart else None, servers=servers,
            servers_step=apart or optimizer == "server", settings=settings, link=link, shard_by=shard_by,
            overlap=overlap, rank=powersgd_rank if thin else None,
        )  # fmt: skip
