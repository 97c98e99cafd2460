"""Asynchronous SGD with parameter servers: workers never wait for each other."""

from __future__ import annotations

from typing import Literal, final

from fabricx.distributed.codecs import VectorCompression
from fabricx.errors import check_choice
from fabricx.parameter_server.strategy import LinkKind, Overlap, ServedStrategy, ShardBy
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.local_rounds import LocalRounds


@final
class AsyncSGD(ServedStrategy):
    """Train each batch on the first worker that is ready, and apply each gradient on arrival.

    Other workers update the weights while a gradient is computed; the gradient's staleness is the number of these
    updates. By default the update is divided by the staleness, so that the learning rate of ddp remains stable. The
    gradient is not divided, because Adam normalises its scale; moments use the undivided gradient.

    Sources: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; division by staleness: Zhang et al., IJCAI
    2016; delay compensation: Zheng et al., "Asynchronous SGD with Delay Compensation", ICML 2017; elastic averaging:
    Zhang et al., NIPS 2015; asynchronous local SGD: Liu et al., arXiv 2401.09135.

    Args:
        max_staleness: bound on staleness, in updates or batches (see `bound`); None for no bound.
        bound: "version": no gradient older than `max_staleness` updates is applied; "clock": no worker is more than
            `max_staleness` batches ahead of the slowest worker.
        on_stale: action at a bound by version: the other workers "wait", the gradient is dropped ("drop", and its
            batch trained again), or its update is divided by its staleness ("damp", which bounds nothing).
        compensation: delay compensation, "dc" or "dc-adaptive"; None for none.
        dc_lambda: strength of the compensation; None for 0.04 with "dc" and 2.0 with "dc-adaptive".
        dc_momentum: decay of the mean square in "dc-adaptive".
        damp: divide updates by the staleness of their gradients; "auto" does so without compensation and `outer`.
        every: steps of a round; a worker makes them with its own optimizer, and then sends its weight difference.
        outer: method by which servers apply the weight difference: "sum" (Downpour), "average" (the difference divided
            by the number of workers), "nesterov" (asynchronous DiLoCo, with delayed momentum), or "elastic" (workers
            keep their own weights; worker and server weights are drawn towards each other). None sends gradients, with
            every=1.
        outer_lr: learning rate of "nesterov".
        outer_momentum: momentum of "nesterov".
        elastic_rate: fraction of the difference that "elastic" moves; None for 0.9 divided by the number of workers.
        servers: processes that keep the parameters.
        compression: of gradients, with error feedback: "bf16", "fp16" (half the bytes), "topk" (the largest
            `compression_keep` of the elements, 8 bytes each), or "sign" (1 bit each).
        compression_keep: fraction of the elements that "topk" sends.
        pull_compression: the same for the weight differences that servers send.
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
        compression: VectorCompression | None = None,
        compression_keep: float = 0.01,
        pull_compression: VectorCompression | None = None,
        snapshot_every: int = 100,
        link: LinkKind = "auto",
        shard_by: ShardBy = "auto",
        overlap: Overlap = "backward",
    ) -> None:
        check_choice("async_sgd", "bound", bound, ("version", "clock"))
        check_choice("async_sgd", "on_stale", on_stale, ("wait", "drop", "damp"))
        check_choice("async_sgd", "compensation", compensation, ("dc", "dc-adaptive", None))
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: must be 0 or more updates, or None for no bound")
        if on_stale == "drop" and servers > 1:
            raise ValueError(
                f"on_stale='drop' needs servers=1, not {servers}: several servers would drop different gradients"
            )
        if on_stale != "wait" and (max_staleness is None or bound == "clock"):
            raise ValueError(
                f"on_stale={on_stale!r} is the action at a bound by version: set max_staleness with bound='version', "
                "or remove on_stale"
            )
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
        protocol = Asynchronous(settings) if outer is None else LocalRounds(settings, every, elastic_rate)
        super().__init__(
            protocol,
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
        raise ValueError(f"every={every} needs a method for the result of a round; set outer='average', for example")
    if outer is not None and corrects:
        raise ValueError(
            f"outer={outer!r}: the weight difference of a round is not corrected for staleness; remove max_staleness, "
            "compensation and damp"
        )
