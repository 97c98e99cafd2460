"""No worker waits for another."""

from __future__ import annotations

from typing import Literal, final

from fabricx.parameter_server.strategy import LinkKind, Overlap, ServedStrategy, ShardBy, check_choice
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.local_rounds import Rounds


@final
class AsyncSGD(ServedStrategy):
    """Each worker takes the next batch when it is ready, and its gradient is applied when it arrives.

    A gradient was computed with weights that others have changed since; its staleness is the number of updates in
    between. By default the update (not the gradient, whose scale Adam divides by) is divided by that, so that the
    learning rate of ddp stays a stable one. Moments see the whole gradient.

    Sources: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; division by staleness: Zhang et al., IJCAI
    2016; delay compensation: Zheng et al., "Asynchronous SGD with Delay Compensation", ICML 2017; elastic averaging:
    Zhang et al., NIPS 2015; asynchronous local SGD: Liu et al., arXiv 2401.09135.

    Args:
        max_staleness: the bound; None for no bound.
        bound: "version": no gradient older than that is applied; "clock": no worker has done more than that many
            batches more than the slowest.
        on_stale: what happens at a bound by version: others "wait", the gradient is dropped ("drop", and its batch
            trained again), or its update is divided by its staleness ("damp"; that bounds nothing).
        compensation: "dc" or "dc-adaptive".
        dc_lambda: strength of the compensation; 0.04 for "dc" and 2.0 for "dc-adaptive" if not given.
        dc_momentum: of the mean square of "dc-adaptive".
        damp: divide updates by the staleness of their gradients; "auto" does without compensation.
        every: steps that a worker makes by itself, with its own optimizer, before it brings what it has moved.
        outer: what the servers do with that: "sum" (Downpour), "average" (that, divided by the number of workers),
            "nesterov" (asynchronous DiLoCo, with the momentum delayed), or "elastic" (a worker keeps its own weights,
            and draws them and the servers' towards each other). None, with every=1: gradients are brought.
        outer_lr, outer_momentum: of "nesterov".
        elastic_rate: of "elastic": which part of the difference; 0.9 divided by the number of workers if not given.
        servers: processes that keep the parameters.
        compression: of gradients, with what is lost added to the next: "bf16", "fp16" (half the bytes), "topk" (the
            largest `compression_keep` of the elements, 8 bytes each), or "sign" (a bit each).
        compression_keep: the part of the elements that "topk" sends.
        pull_compression: the same of the differences of weights that come back.
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
        max_staleness: int | None = None,
        bound: Literal["version", "clock"] = "version",
        on_stale: Literal["wait", "drop", "damp"] = "wait",
        compensation: Literal["dc", "dc-adaptive"] | None = None,
        dc_lambda: float | None = None,
        dc_momentum: float = 0.95,
        damp: bool | Literal["auto"] = "auto",
        every: int = 1,
        outer: Literal["sum", "average", "nesterov", "elastic"] | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        elastic_rate: float | None = None,
        servers: int = 1,
        compression: Literal["bf16", "fp16", "topk", "sign"] | None = None,
        compression_keep: float = 0.01,
        pull_compression: Literal["bf16", "fp16", "topk", "sign"] | None = None,
        snapshot_every: int = 100,
        link: LinkKind = "auto",
        shard_by: ShardBy = "auto",
        overlap: Overlap = "backward",
    ) -> None:
        check_choice("async_sgd", "bound", bound, ("version", "clock"))
        check_choice("async_sgd", "on_stale", on_stale, ("wait", "drop", "damp"))
        check_choice("async_sgd", "compensation", compensation, ("dc", "dc-adaptive", None))
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: 0 or more updates, or None for no bound")
        if on_stale == "drop" and servers > 1:
            raise ValueError("on_stale='drop' needs servers=1: each server would drop gradients of its own choice")
        _check_rounds(every, outer, corrects=max_staleness is not None or compensation is not None or damp is True)
        self.every = every
        self.outer = outer
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.elastic_rate = elastic_rate
        self.max_staleness = max_staleness
        self.bound = bound
        self.on_stale = on_stale
        self.compensation = compensation
        self.dc_lambda = dc_lambda if dc_lambda is not None else 0.04 if compensation == "dc" else 2.0
        self.dc_momentum = dc_momentum
        self.damp = compensation is None and outer is None if damp == "auto" else bool(damp)
        self.pull_compression = pull_compression
        self.overlap = overlap
        self.compression = compression
        self.snapshot_every = snapshot_every
        self.compression_keep = compression_keep
        settings = Settings(
            workers=0, aggregate=False, max_staleness=max_staleness, bound=bound, on_stale=on_stale,
            compensation=compensation, dc_lambda=self.dc_lambda, dc_momentum=dc_momentum, damp=self.damp,
            compression=compression, pull_compression=pull_compression, keep=compression_keep,
            snapshot_every=snapshot_every,
            outer=outer, outer_lr=outer_lr, outer_momentum=outer_momentum,
        )  # fmt: skip
        pace = Asynchronous(settings) if outer is None else Rounds(settings, every, elastic_rate)
        super().__init__(
            pace,
            servers=servers,
            servers_step=outer is None,
            settings=settings,
            link=link,
            shard_by=shard_by,
            overlap=overlap,
        )


def _check_rounds(every: int, outer: str | None, *, corrects: bool) -> None:
    check_choice("async_sgd", "outer", outer, ("sum", "average", "nesterov", "elastic", None))
    if every < 1:
        raise ValueError(f"every={every}: a round has 1 step or more")
    if every > 1 and outer is None:
        raise ValueError(f"every={every} needs to know what becomes of a round: say outer='average', for example")
    if outer is not None and corrects:
        raise ValueError(
            f"outer={outer!r}: what a worker has moved in a round isn't corrected; leave max_staleness, compensation "
            "and damp out"
        )
