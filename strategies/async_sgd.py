"""Asynchronous SGD with parameter servers: workers never wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from fabricx.errors import check_choice, check_share
from fabricx.parameter_server.strategy import ServedStrategy
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.local_rounds import LocalRounds


@final
@dataclass(kw_only=True, eq=False, repr=False)
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
        compression: see `ServerOptions`; without "powersgd".
        servers, compression_keep, pull_compression, snapshot_every, link, shard_by, overlap: see `ServerOptions`.

    Raises:
        ValueError: an option is unknown or out of range, or options exclude each other.
    """

    compression: str | None = None
    max_staleness: int | None = None
    bound: Literal["version", "clock"] = "version"
    on_stale: Literal["wait", "drop", "damp"] = "wait"
    compensation: Literal["dc", "dc-adaptive"] | None = None
    dc_lambda: float | None = None
    dc_momentum: float = 0.95
    damp: bool | Literal["auto"] = "auto"
    every: int = 1
    outer: Literal["sum", "average", "nesterov", "elastic"] | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    elastic_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_staleness()
        self._check_rounds()
        dc_lambda = self.dc_lambda or (0.04 if self.compensation == "dc" else 2.0)
        self.damp = self.compensation is None and self.outer is None if self.damp == "auto" else bool(self.damp)
        settings = self.settings(
            aggregate=False, max_staleness=self.max_staleness, bound=self.bound, on_stale=self.on_stale,
            compensation=self.compensation, dc_lambda=dc_lambda, dc_momentum=self.dc_momentum, damp=self.damp,
            outer=self.outer, outer_lr=self.outer_lr, outer_momentum=self.outer_momentum,
        )  # fmt: skip
        rounds = None if self.outer is None else LocalRounds(settings, self.every, self.elastic_rate)
        self._design_with(settings, rounds or Asynchronous(settings), servers_step=rounds is None)

    def _check_staleness(self) -> None:
        check_choice("async_sgd", "bound", self.bound, ("version", "clock"))
        check_choice("async_sgd", "on_stale", self.on_stale, ("wait", "drop", "damp"))
        check_choice("async_sgd", "compensation", self.compensation, ("dc", "dc-adaptive", None))
        if self.dc_lambda is not None and (self.compensation is None or not self.dc_lambda > 0.0):
            raise ValueError(
                f"dc_lambda={self.dc_lambda}: must be more than 0, with compensation='dc' or 'dc-adaptive'"
            )
        check_share("dc_momentum", self.dc_momentum)
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: must be 0 or more updates, or None for no bound")
        if self.on_stale == "drop" and self.servers > 1:
            raise ValueError(
                f"on_stale='drop' needs servers=1, not {self.servers}: several servers would drop different gradients"
            )
        if self.on_stale != "wait" and (self.max_staleness is None or self.bound == "clock"):
            raise ValueError(
                f"on_stale={self.on_stale!r} needs a bound on the staleness of gradients: set max_staleness with "
                "bound='version', or remove on_stale"
            )

    def _check_rounds(self) -> None:
        check_choice("async_sgd", "outer", self.outer, ("sum", "average", "nesterov", "elastic", None))
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 or more steps")
        if self.elastic_rate is not None and (self.outer != "elastic" or not 0.0 < self.elastic_rate <= 1.0):
            raise ValueError(
                f"elastic_rate={self.elastic_rate}: must be more than 0 and at most 1, with outer='elastic'"
            )
        if not self.outer_lr > 0.0:
            raise ValueError(f"outer_lr={self.outer_lr}: must be more than 0")
        check_share("outer_momentum", self.outer_momentum)
        if self.every > 1 and self.outer is None:
            raise ValueError(
                f"every={self.every} needs a method for the result of a round; set outer='average', for example"
            )
        corrects = self.max_staleness is not None or self.compensation is not None or self.damp is True
        if self.outer is not None and corrects:
            raise ValueError(
                f"outer={self.outer!r}: the weight difference of a round is not corrected for staleness; remove "
                "max_staleness, compensation and damp"
            )
