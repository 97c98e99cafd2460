"""Parameters with servers: workers bring gradients, and fetch what comes of them."""

from __future__ import annotations

from typing import Literal, final

from fabricx.parameter_server.strategy import LinkKind, Overlap, ServedStrategy, ShardBy, check_choice
from fabricx.parameter_server.wire.codecs import KINDS
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous


@final
class ParameterServer(ServedStrategy):
    """Servers keep the parameters in parts, by size; `devices` counts the workers, and servers are beside them.

    Synchronously it computes what ddp computes. Asynchronously no worker waits for another: each takes the next batch
    of the one order of the data when it is ready, so every sample is trained once an epoch, and a slow worker just
    takes fewer.

    Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013; backup workers: Chen et al.,
    "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

    Args:
        mode: "sync", "bounded" (at most `max_staleness` behind) or "async".
        servers: how many; the parameters are divided among them. 0 in "sync", on one machine: no server, each worker
            sums a part of the gradients in memory that all see, which is the fastest way there. With optimizer="server"
            the weights are in that memory too, and each worker steps its part.
        optimizer: who steps in "sync": "worker" (servers sum) or "server" (which has the only moments). Where servers
            step, and in "bounded", a hook that reads gradients gets an error: the global mean isn't with the workers.
            So does one that changes weights there, and in "async": they are with the servers.
        max_staleness: of "bounded": how many global batches a worker may be ahead of the oldest that isn't complete.
        apply: of "bounded": "aggregate" makes one update of each global batch; "arrival" one of each gradient, and then
            the bound is on how many batches a worker has done more than the slowest.
        backup_workers: of "sync": an update takes the first gradients that come, of as many workers as there are but
            for these, and the servers step. What comes late is dropped, and its data dealt again in the same epoch.
            An update is the mean of so many batches fewer.
        compression: of gradients, with what is lost added to the next: "bf16", "fp16" (half the bytes), "topk" (the
            largest `compression_keep` of the elements, 8 bytes each), "sign" (a bit each), or, where workers step,
            "powersgd" (two thin matrices for each large one).
        compression_keep: the part of the elements that "topk" sends.
        powersgd_rank: columns of those matrices; more are closer and slower.
        pull_compression: the same of what comes back, sums or differences of weights.
        snapshot_every: updates between two snapshots of each server. A server that dies is started again from the
            newest and a journal of what it was sent since, so that nothing is lost; these take the memory of 6 copies
            of the weights and 2 of the moments. 0: neither, and the run ends with a server. Not under torchrun.
        link: "auto" is shared memory on one machine and gloo between machines; "gloo" is gloo everywhere.
        shard_by: where parameters may be cut among servers: "element", "tensor" (nowhere), or "auto", which knows
            torch's optimizers. With one server nothing is cut. Of optimizers of other kinds it is tried at set-up.
        overlap: gradients leave while "backward" goes on; with "forward", where servers step, weights come while the
            next step has begun: layer after layer, as they are called. Callbacks between two steps see the old ones.
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
        compression: Literal["bf16", "fp16", "topk", "sign", "powersgd"] | None = None,
        compression_keep: float = 0.01,
        powersgd_rank: int = 2,
        pull_compression: Literal["bf16", "fp16", "topk", "sign"] | None = None,
        snapshot_every: int = 100,
        link: LinkKind = "auto",
        shard_by: ShardBy = "auto",
        overlap: Overlap = "backward",
    ) -> None:
        check_choice("parameter_server", "mode", mode, ("sync", "bounded", "async"))
        check_choice("parameter_server", "optimizer", optimizer, ("worker", "server"))
        check_choice("parameter_server", "compression", compression, (*KINDS, "powersgd", None))
        check_choice("parameter_server", "apply", apply, ("aggregate", "arrival"))
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: 0 or more updates")
        if backup_workers < 0 or (backup_workers and (mode != "sync" or servers != 1)):
            raise ValueError(
                f"backup_workers={backup_workers}: 0 or more workers, with mode='sync' and servers=1 (each server "
                "would drop gradients of its own choice)"
            )
        self.backup_workers = backup_workers
        apart = mode != "sync" or backup_workers > 0
        self.mode = mode
        self.optimizer = optimizer
        self.max_staleness = max_staleness
        self.apply = apply
        if powersgd_rank < 1:
            raise ValueError(f"powersgd_rank={powersgd_rank}: 1 or more columns")
        thin = compression == "powersgd"
        if thin and (apart or optimizer == "server"):
            raise ValueError("compression='powersgd' needs all workers in each update: mode='sync', optimizer='worker'")
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
