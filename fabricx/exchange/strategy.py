"""The strategy of workers that have servers, for all ways of using them; the strategies by name are its presets."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.comm.apart import apart
from fabricx.comm.world import World
from fabricx.errors import did_you_mean
from fabricx.exchange.client import Client
from fabricx.exchange.compression import KINDS
from fabricx.exchange.messages import Counts, Granted, Settings
from fabricx.exchange.rules import needs_whole_tensors
from fabricx.strategy import Strategy, Traits

LinkKind = Literal["auto", "gloo"]
ShardBy = Literal["auto", "element", "tensor"]


def check_choice(strategy: str, option: str, value: object, known: Sequence[str | None]) -> None:
    """Raise an error that names the nearest word, if a value isn't one of those that are known."""
    if value not in known:
        words = [str(word) for word in known]
        raise ValueError(
            f"{option}={value!r} isn't known to {strategy}.{did_you_mean(str(value), words)}\n"
            f"  known: {', '.join(words)}"
        )


class ServedStrategy(Strategy):
    """Workers bring gradients to servers, and weights or sums from them.

    Together: each update is of the gradient of a whole global batch, and all ranks go step by step. Apart: a worker
    takes the next part of the data whenever it is ready, and the servers step.

    Args:
        servers: processes beside the workers; each keeps a part of the parameters.
        apart: see above.
        servers_step: the servers step the user's optimizers; else they sum, and workers step.
        settings: what servers are told, but for the number of workers.
        link: "auto" is shared memory where a server is on the worker's machine, and gloo elsewhere; "gloo" is gloo.
        shard_by: "element" cuts parameters anywhere, "tensor" nowhere; "auto" looks at the optimizers.
    """

    def __init__(
        self, *, servers: int, apart: bool, servers_step: bool, settings: Settings, link: LinkKind, shard_by: ShardBy
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        if servers < 1:
            raise ValueError(f"servers={servers}: 1 or more processes keep the parameters")
        check_choice(name, "link", link, ("auto", "gloo"))
        check_choice(name, "compression", settings.compression, (*KINDS, None))
        if not 0.0 < settings.keep <= 1.0:
            raise ValueError(f"compression_keep={settings.keep}: a part of the elements, more than 0 and at most 1")
        check_choice(name, "shard_by", shard_by, ("auto", "element", "tensor"))
        self.servers = servers
        self.link = link
        self.shard_by = shard_by
        self.traits = Traits(synchronous=not apart, quiet_point=apart, elastic=apart)
        self._apart = apart
        self._servers_step = servers_step
        self._settings = settings
        self._client: Client | None = None
        self._optimizers: list[Optimizer] = []
        self._parameters: list[Tensor] = []
        self._clock = 0  # updates that this worker has been a part of
        self._version = 0  # updates that it knows of
        self._stale = False  # have the weights to be brought before the next step?
        self._stepped = False
        self._told: _Totals | None = None  # what was measured when it was asked for last
        self._several_backwards = False
        self._pushed = False  # has this update's gradient been brought already?
        self._scales: list[tuple[list[Tensor], float]] = []  # what it is to be clipped by
        self._limits: list[tuple[list[Tensor], float]] = []
        self._closing = True  # does the next backward end an accumulation window?
        self._section = -1
        self.lease: Granted | None = None  # what is being trained
        self._present: tuple[int, ...] = ()  # of those, at the end of the newest section
        self._workers: tuple[int, ...] = ()  # as the servers number them, by rank

    # -- set up -------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if several_backwards and self._servers_step:
            raise ValueError(
                "servers step once a batch, and a manually optimised module steps by itself: take "
                "strategy=parameter_server with optimizer=worker, strategy=ddp, or automatic optimization"
            )
        if self._apart and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
            raise ValueError(
                "SyncBatchNorm needs all ranks in each forward, and here each goes at its own pace: use BatchNorm (its "
                "statistics are joined for validation and checkpoints), or strategy=ddp"
            )
        for name, part in module.named_modules():
            if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                raise ValueError(
                    f"{name} has sparse=True, and sparse gradients don't travel to servers: say sparse=False"
                )
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise ValueError(f"{name} is complex, and servers keep real numbers: train its view_as_real")
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast(tensor.data)

    def take_over(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        whole = self.shard_by == "tensor"
        if self._servers_step and self.shard_by == "auto":
            whole = needs_whole_tensors(optimizers)
        if self.world.store is None:
            raise ValueError(f"{type(self).__name__} needs servers, which are started with the workers")
        self._client = Client(
            self.world.store, self.world.key("exchange"), self.world.rank, self._parameters, self.servers,
            whole=whole, over_gloo=self.link == "gloo", same=not self._servers_step,
            compression=self._settings.compression, keep=self._settings.keep,
        )  # fmt: skip

    def starts(self, step: int) -> None:
        assert self._client is not None
        self._clock = self._version = step
        self._settings.workers = self.world.size
        self._client.begin(self._settings, self._optimizers if self._servers_step else None, step)
        if self._servers_step:  # they have it now
            for optimizer in self._optimizers:
                optimizer.state.clear()
        self._told = None
        self._stale = self._apart
        self._section = -1
        self._workers = tuple(range(self.world.size))

    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None
        super().teardown()

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if not self._apart:
            return step

        def with_newest_weights(*args: Any) -> Any:
            if self._stale:
                self._pull(self._least_version(), to_train=True)
                self._stale = False
            with apart():
                return step(*args)

        return with_newest_weights

    def _least_version(self) -> int:
        """Return how new weights have to be for the lease: the server that dealt it may be ahead of the others."""
        settings = self._settings
        if self.lease is None or not settings.aggregate or settings.max_staleness is None:
            return 0
        return max(0, self.lease.clock - settings.max_staleness)

    # -- one step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        self._closing = False
        try:
            yield
        finally:
            self._closing = True

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._window_goes_on()

    def backward(self, loss: Tensor) -> None:
        earlier = self._set_aside() if self._several_backwards else []
        loss.backward()  # type: ignore[no-untyped-call]
        self._come_together()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def backward_nothing(self, *company: Any) -> bool:
        if self._apart:
            return False
        self._come_together()
        return True

    def _set_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Take away what is the sum of all ranks already: only what a backward adds has to be summed."""
        earlier = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        return earlier

    def _come_together(self) -> None:
        """Join gradients at the end of a window; where servers step, workers only see that all have come this far."""
        if self._apart or self._client is None or not self._closing:
            return
        if self._servers_step:
            self.world.barrier()
        else:
            self._sum()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        if not self._servers_step or self._apart or self._client is None:
            return super().clip_norm(parameters, max_norm)
        clipped = list(parameters)
        self._push_held()
        norm = self._client.norm(self._clock, clipped)
        self._scales.append((clipped, min(1.0, max_norm / (norm + 1e-6))))  # as torch's clip_grad_norm_ does
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        if not self._servers_step or self._apart:
            super().clip_value(parameters, limit)
        else:
            self._limits.append((list(parameters), limit))

    def _push_held(self) -> None:
        """Bring this worker's part of an update that the servers hold until they are told to make it."""
        if not self._pushed:
            self._push(clock=self._clock, parts=self.world.size, lease=self.world.rank, hold=True)
        self._pushed = True

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if not self._servers_step:
            return super().step(optimizer, closure)
        self._stepped = True
        return None

    def updated(self, step: int) -> int:
        if not self._servers_step or self._client is None:
            return step
        stepped, self._stepped = self._stepped, False
        if self._apart:
            return self._bring(stepped)
        self._push_held()
        self._client.apply(self._clock, self._scales, self._limits)
        self._scales, self._limits, self._pushed = [], [], False
        self._clock += 1
        self._pull(self._clock)
        return step

    def _bring(self, stepped: bool) -> int:
        """Push the gradient of a lease, and say how many updates this worker knows of."""
        lease, self.lease = self.lease, None
        if lease is None or lease.lease is None:
            return self._version
        self._push(clock=lease.clock, parts=lease.parts, lease=lease.lease, empty=not stepped)
        self._version += stepped
        self._stale = True
        return self._version

    def _push(self, *, clock: int, parts: int, lease: int, empty: bool = False, hold: bool = False) -> None:
        assert self._client is not None
        gradients = [None if empty else parameter.grad for parameter in self._parameters]
        groups = [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._client.push(
            gradients, clock=clock, parts=parts, lease=lease, groups=groups if self._servers_step else None, hold=hold
        )

    def _pull(self, version: int = 0, *, to_train: bool = False) -> None:
        assert self._client is not None
        one_by_one = to_train and self._settings.orders_updates
        self._version = self._client.pull(self._parameters, version, to_train=to_train, one_by_one=one_by_one)

    def _sum(self) -> None:
        """Put the sum of all workers' gradients in the place of this one's."""
        assert self._client is not None
        self._push(clock=self._clock, parts=self.world.size, lease=self.world.rank)
        self._clock += 1
        for parameter in self._parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self._client.pull([p if p.grad is None else p.grad for p in self._parameters], self._clock)
        for number in self._client.missing:
            self._parameters[number].grad = None

    # -- the data -----------------------------------------------------------------------------------------------

    @property
    def dealer(self) -> ServedStrategy | None:
        return self if self._apart else None

    def open(self, leases: int) -> None:
        """Begin a section of so many leases; all workers do."""
        assert self._client is not None
        self._section += 1
        self._present = self._workers
        self._client.open(self._section, leases, self._version)

    def ask(self, *, wait: bool) -> Granted:
        """Return the next lease."""
        assert self._client is not None
        granted = self._client.ask(self._section, wait=wait)
        if granted.over:
            self._present = granted.workers
        return granted

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the ranks that died since all met last."""
        return tuple(rank for rank, worker in enumerate(self._workers) if worker not in self._present)

    def world_changed(self, world: World) -> None:
        self.world, self._workers = world, self._present
        self._settings.workers = world.size

    def close_section(self) -> None:
        """Let all workers meet as soon as they have done what they hold."""
        assert self._client is not None
        self._client.close_section(self._section)

    @property
    def leases_per_update(self) -> int:
        """Return how many workers' batches make an update."""
        return self.world.size if self._settings.aggregate else 1

    @property
    def updates_per_batch(self) -> int:
        return 1 if not self._apart or self._settings.aggregate else self.world.size

    # -- between the ranks --------------------------------------------------------------------------------------

    def quiesce(self, copies: Mapping[str, Tensor] | None = None) -> None:
        if self._apart and self._client is not None and self.module is not None:
            self._client.counts()  # all that this worker has pushed is in
            self.world.barrier()
            self._pull()
            _pool_statistics(self.module, self.world)
        super().quiesce(copies)

    def counts(self) -> list[Counts]:
        """Return what each server has seen: updates, staleness, what was dropped."""
        return self._client.counts() if self._client is not None else []

    def measured(self) -> dict[str, float]:
        if self._client is None:
            return {}
        workers = self.world.gather_objects((*self.traffic, self._client.waited_s))
        servers = self.counts()
        now = _Totals(workers, servers)
        before, self._told = self._told, now
        return now.since(before) if self.world.main_rank else {}

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients and weights that this worker has sent and received."""
        return self._client.traffic if self._client is not None else (0, 0)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        if not self._servers_step or self._client is None or not optimizers:
            return super().state_dict(module, optimizers)
        for optimizer, states in zip(optimizers, self._client.optimizer_states(), strict=True):
            for parameter, state in zip(self._parameters, states, strict=True):
                if state:
                    optimizer.state[parameter] = state
        found = super().state_dict(module, optimizers)
        for optimizer in optimizers:
            optimizer.state.clear()
        return found


class _Totals:
    """What all workers and servers have counted since they began."""

    def __init__(self, workers: Sequence[tuple[int, int, float]], servers: Sequence[Counts]) -> None:
        sent, received, waited = (sum(column) for column in zip(*workers, strict=True))
        self.totals = {"sent_mib": sent / 2**20, "received_mib": received / 2**20, "waited_s": waited}
        self.totals["dropped"] = float(sum(server.dropped for server in servers))
        self.staleness = Counter[int]()
        for server in servers:
            self.staleness.update(server.staleness)
        self.lead = max(server.lead for server in servers)

    def since(self, before: _Totals | None) -> dict[str, float]:
        """Return what has come since then, by the names that loggers see."""
        earlier = before.totals if before is not None else dict.fromkeys(self.totals, 0.0)
        # Less than before, where a worker or a server has died.
        found = {f"exchange/{name}": max(0.0, value - earlier[name]) for name, value in self.totals.items()}
        staleness = self.staleness - before.staleness if before is not None else self.staleness
        if staleness:
            found["exchange/staleness_mean"] = sum(k * n for k, n in staleness.items()) / staleness.total()
            found["exchange/staleness_max"] = float(max(staleness))
        return {**found, "exchange/clock_lead": float(self.lead)}


def _pool_statistics(module: nn.Module, world: Any) -> None:
    """Join the running statistics of batch normalisation: the mean of means, and the variance of all together."""
    for part in module.modules():
        mean, variance = getattr(part, "running_mean", None), getattr(part, "running_var", None)
        if not isinstance(mean, Tensor) or not isinstance(variance, Tensor) or world.size == 1:
            continue
        square = world.all_reduce(variance + mean.square()) / world.size
        mean.copy_(world.all_reduce(mean.clone()) / world.size)
        variance.copy_((square - mean.square()).clamp_(min=0))
