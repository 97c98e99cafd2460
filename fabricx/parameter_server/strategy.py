"""Strategy with parameter servers in all modes; the named strategies are presets of it."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.averaging import AverageRule
from fabricx.core.strategy import Strategy, Traits, warn_of_lost_residuals
from fabricx.distributed.generations import membership
from fabricx.distributed.sync_batchnorm import synchronised
from fabricx.distributed.world import World
from fabricx.parameter_server.divisible import needs_whole_tensors
from fabricx.parameter_server.options import LinkKind, ServerOptions
from fabricx.parameter_server.sparse_embeddings import before_lookups, check_servers_can_step, sparse_embeddings
from fabricx.parameter_server.totals import Totals
from fabricx.parameter_server.wire.messages import Counts, Settings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.local_rounds import LocalRounds
from fabricx.parameter_server.worker.prefetch import PrefetchHooks
from fabricx.parameter_server.worker.protocol import ServerStep, WorkerProtocol, WorkerStep
from fabricx.parameter_server.worker.running_statistics import RunningStatistics
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum
from fabricx.parameter_server.worker.shared_memory_weights import SharedWeights


class ServedStrategy(ServerOptions, Strategy):
    """Workers push gradients to servers, and pull weights or sums of gradients.

    A strategy is a dataclass: its options are fields, and its `__post_init__` ends with `_design`.
    """

    link: LinkKind  # of the types in both bases, the narrower

    def __post_init__(self) -> None:
        Strategy.__init__(self)
        super().__post_init__()

    def _design(
        self, settings: Settings, protocol: Asynchronous | None, *, servers_step: bool, rank: int | None = None
    ) -> None:  # fmt: skip
        """Define who steps, and when.

        Args:
            settings: behaviour of the servers, without the number of workers.
            protocol: for workers at their own pace; None for workers in lockstep.
            servers_step: servers step the user's optimizers; otherwise they sum, and workers step.
            rank: of the low-rank factors in place of gradients (PowerSGD), if workers step; None for none.

        Raises:
            ValueError: options exclude each other.
        """
        self._compresses = settings.compresses or rank is not None
        alone = protocol is None and not self._compresses and self.link == "auto" and self.overlap == "backward"
        if self.servers < 0 or (self.servers == 0 and not alone):
            raise ValueError(
                f"servers={self.servers}: 1 or more processes keep the parameters; without servers, workers of a "
                "machine do so in shared memory (mode='sync', link='auto', no compression, overlap='backward')"
            )
        if self.overlap == "forward" and (not servers_step or settings.outer is not None):
            raise ValueError("overlap='forward' needs servers that step: workers that step need the complete sum first")
        self.traits = Traits(
            synchronous=protocol is None,
            unreplicated=protocol is None and (servers_step or self._compresses),
            elastic=True,
            checkpoint_averages=protocol is None and servers_step and settings.pull_compression is not None,
        )
        self._settings = settings
        self._servers_step = servers_step
        self._apart = protocol
        self._protocol: WorkerProtocol | None = self._apart
        self._client: Client | None = None
        self._optimizers: list[Optimizer] = []
        self._several_backwards = False
        self._parameters: list[Tensor] = []
        self._rank = rank
        self._kept: Any = None  # error feedback from a checkpoint
        self._measured_before: Totals | None = None  # totals at the previous call of `measured`
        self._undo: list[Callable[[], None]] = []
        self._statistics: RunningStatistics | None = None  # of workers at their own pace

    # -- set up -------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if several_backwards and (self._servers_step or self._apart is not None):
            raise ValueError(
                "servers step once per batch, and a manually optimised module steps by itself: use "
                "strategy=parameter_server with optimizer=worker, strategy=ddp, or automatic optimization"
            )
        if self._apart is not None and synchronised(module):
            raise ValueError(
                "SyncBatchNorm needs all ranks in each forward, but each rank works at its own pace: use BatchNorm "
                "(its statistics are joined for validation and checkpoints), or strategy=ddp"
            )
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise ValueError(f"{name} is complex, and servers keep real numbers: train its view_as_real")
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast(tensor.data)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        if self._apart is not None and self.world.size > 1 and self.world.main_rank:
            _warn_of_momentum(optimizers, self._settings)
        if self._apart is not None or not self.world.newcomer:
            self._connect()

    def _connect(self) -> None:
        """Connect to the servers with the present ranks."""
        optimizers = self._optimizers
        tables = sparse_embeddings(self.module, self._parameters) if self._settings.outer is None else {}
        whole = self.shard_by == "tensor"
        if self._servers_step:
            check_servers_can_step(optimizers, [self._parameters[number] for number in tables.values()])
            parts = self.servers or self.world.size
            whole = needs_whole_tensors(
                optimizers, self._parameters, parts, self.shard_by, frozenset(tables.values())
            )  # fmt: skip
        low_rank = None if self._rank is None else LowRank(self._parameters, self._rank)
        protocol = self._protocol = self._apart or self._lockstep_protocol(low_rank, whole)
        for option, value in (("compensation", self._settings.compensation), ("compression='powersgd'", self._rank)):
            if tables and value is not None:
                raise ValueError(f"{option} does not support sparse gradients: set sparse=False, or remove {option}")
        carriers = self._parameters if low_rank is None else low_rank.carriers
        # In lockstep, a worker that waits for a server must be interrupted when another worker dies.
        links = membership().opening() if self._apart is None else contextlib.nullcontext()
        with links:
            self._client = self._make_client(carriers, whole, frozenset(tables.values()))
        protocol.begin(self.world, self._client, self._parameters, optimizers)
        if self._settings.outer is None:
            self._undo.append(self._client.register_grad_hooks())
        if self.overlap == "forward" and self.module is not None:
            protocol.prefetch = PrefetchHooks(self.module, self._parameters, self._client.await_parameters)
            self._undo.append(protocol.prefetch.end)
        if self._servers_step:
            self._undo += before_lookups(tables, protocol)

    def _make_client(self, parameters: list[Tensor], whole: bool, tables: frozenset[int]) -> Client:
        world, key = self.world, self.world.key("exchange")
        views = not self._several_backwards and self._settings.outer is None and self._rank is None
        if not self.servers:
            if self._servers_step and tables:
                raise ValueError("servers=0 with optimizer='server' does not support sparse gradients: set servers=1")
            exchange = SharedMemorySum(world, key, parameters, views=views, tables=tables, weights=self._servers_step)
            return cast(Client, exchange)  # implements the methods of a client that lockstep protocols use
        if world.store is None:
            raise ValueError(f"{type(self).__name__} needs servers, which are started with the workers")
        return Client(
            world.store, key, world.secret, world.rank, parameters, self.servers, whole=whole, views=views,
            tables=tables, over_gloo=self.link == "gloo", sums=self._apart is None and not self._servers_step,
            compression=self._settings.compression, back=self._settings.pull_compression, keep=self._settings.keep,
            generation=world.generation if self._apart is None else None,
        )  # fmt: skip

    def _lockstep_protocol(self, low_rank: LowRank | None, whole: bool) -> WorkerProtocol:
        if self._servers_step:
            return ServerStep(self._settings) if self.servers else SharedWeights(self._settings, whole=whole)
        return WorkerStep(self._settings, several=self._several_backwards, low_rank=low_rank)

    def on_train_start(self, step: int, ranks: int) -> None:
        assert self._protocol is not None
        self._restore_feedback(self._protocol)
        if self._apart is not None:
            self._apart.planned = ranks
        self._protocol.starts(step)
        if self._apart is not None and self.module is not None:
            self._statistics = self._apart.statistics = RunningStatistics(self.module)
        self._measured_before = None

    def teardown(self) -> None:
        self._disconnect(done=True)
        self._parameters, self._optimizers, self._statistics = [], [], None
        if self._apart is not None:
            self._apart.statistics = None
        super().teardown()

    def _disconnect(self, *, done: bool) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        if self._protocol is not None and self._client is not None:
            self._protocol.end()
            self._protocol.prefetch = None
            self._client.close(done=done)
        for parameter in self._parameters:
            parameter.grad = None  # it may be a view of memory that servers share
        self._client = None

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def in_training(*args: Any) -> Any:
            protocol = self._protocol
            if protocol is None:
                return step(*args)
            if self._statistics is not None:
                self._statistics.computed()
            with protocol.computes():
                return step(*args)

        return in_training

    # -- one step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        with super()._window_goes_on():
            self._set_sends_early(closing=False)
            try:
                yield
            finally:
                self._set_sends_early(closing=True)

    def _set_sends_early(self, *, closing: bool) -> None:
        if self._client is not None:
            self._client.sends_early = closing

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        assert self._protocol is not None
        self._protocol.backward(compute or loss.backward, closing=self.ends_window)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        assert self._protocol is not None
        return self._protocol.complete() if self.ends_window else True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        assert self._protocol is not None
        if self.norm_clipping_refused:
            raise ValueError(self.norm_clipping_refused)
        clipped = list(parameters)
        norm = self._protocol.clip_norm(clipped, max_norm)
        return super().clip_norm(clipped, max_norm) if norm is None else norm

    def hooks_see_gradients(self) -> contextlib.AbstractContextManager[Any]:
        assert self._protocol is not None
        return self._protocol.hooks_see_gradients()

    @property
    def hides_gradients(self) -> bool:
        return self._protocol is not None and self._protocol.pushes_parts

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        assert self._protocol is not None
        return self._protocol.nonfinite_gradients(parameters)

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        assert self._protocol is not None
        self._protocol.drop_gradients(parameters)

    @property
    def norm_clipping_refused(self) -> str:  # type: ignore[override]
        if self._apart is None or not self._settings.aggregate or self.servers == 1 or self.world.size == 1:
            return ""
        return (
            f"the norm of a gradient can't be limited with servers={self.servers} and mode='bounded': each server "
            "has a part of it, and none waits for the others. Use servers=1, gradient_clip_algorithm='value', or "
            "mode='sync'"
        )

    @property
    def batch_weight_refused(self) -> str:  # type: ignore[override]
        if self._apart is None or not (self._settings.aggregate or self._settings.outer):
            return ""
        return (
            "batch_weight needs the weight of the global batch in each update, but no worker waits for the weights of "
            "other workers: use parameter_server with mode='sync' and backup_workers=0, or strategy=ddp or fsdp"
        )

    @property
    def _gradient_is_here(self) -> bool:
        return self._protocol is not None and self._apart is None and not self._protocol.servers_step

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        return super().gradient_norm(optimizers) if self._gradient_is_here else None

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        assert self._protocol is not None
        clipped = list(parameters)
        if not self._protocol.clip_value(clipped, limit):
            super().clip_value(clipped, limit)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        assert self._protocol is not None
        self._protocol.check_parameters()
        return self._protocol.step(optimizer, closure)

    def after_update(self, step: int) -> int:
        assert self._protocol is not None
        return self._protocol.updated(step)

    def wait_for_weights(self, step: int) -> int:
        return step if self._protocol is None else self._protocol.weights_step(step)

    def keep_average(self, rule: AverageRule, step: int, averages: Mapping[str, Tensor]) -> frozenset[str]:
        if self.module is None or not self._servers_see_more:
            return frozenset()
        names = self._names(self.module)
        if self.world.main_rank and not self.world.newcomer and self._client is not None:
            present = [averages.get(name, p) for name, p in zip(names, self._parameters, strict=True)]
            self._client.keep_average(rule, step, present)
        return frozenset(names)

    def read_average(self) -> tuple[dict[str, Tensor], int]:
        if self._client is None or self.module is None:
            return {}, 0
        averages, updates = self._client.averages()
        return dict(zip(self._names(self.module), averages, strict=True)), updates

    @property
    def _servers_see_more(self) -> bool:
        """Return whether a worker's weights lack some updates, or a part of an update."""
        if not self._servers_step or not self.servers:
            return False
        partial = self._settings.pull_compression is not None or bool(sparse_embeddings(self.module, self._parameters))
        return self._apart is not None or partial

    @property
    def lost_with_worker(self) -> list[str]:
        if self._apart is None:
            return []
        lost = ["the error feedback of their compressed gradients"] if self._settings.compression else []
        if self._statistics is not None and self._statistics.layers:
            lost.append("their changes of running statistics since all workers met")
        return lost

    @property
    def global_updates(self) -> bool:  # type: ignore[override]
        return self._apart is None or self._settings.aggregate

    @property
    def weight_pulls(self) -> int | None:  # type: ignore[override]
        if not self._servers_step and self._apart is None:
            return None
        return 0 if self._client is None else self._client.pulls

    def _names(self, module: nn.Module) -> list[str]:
        """Return the names of the servers' parameters, in order."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(self._parameters)]

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self._client.waited_s if self._client is not None else 0.0

    @property
    def pushed_s(self) -> float:  # type: ignore[override]
        return self._client.pushed_s if self._client is not None else 0.0

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        return self._client.pushes if self._client is not None else super().pushes

    @property
    def waits_for_servers(self) -> bool:  # type: ignore[override]
        return self.servers > 0

    @property
    def updates_per_batch(self) -> int:
        if self._apart is None or self._settings.aggregate:
            return 1
        return self._apart.planned or self.world.size

    # -- between the ranks --------------------------------------------------------------------------------------

    @property
    def dealer(self) -> Asynchronous | None:
        return self._apart

    def world_changed(self, world: World) -> None:
        self.world = world
        if self._apart is not None:
            self._apart.world_changed(world)
            return
        self._disconnect(done=False)
        self._connect()
        if self.traits.replicated and self._protocol is not None:
            self._protocol.starts(0)  # any version: only the workers count updates

    def synchronize(self, copies: Mapping[str, Tensor] | None = None) -> None:
        if self._protocol is not None and self._client is not None and self.module is not None:
            self._protocol.meet()
            if self._statistics is not None:
                self._statistics.pool(self.world)
        super().synchronize(copies)

    def counts(self) -> list[Counts]:
        """Return the statistics of each server: updates, staleness, dropped gradients."""
        return self._client.counts() if self._client is not None else []

    def measured(self) -> dict[str, float]:
        if self._client is None:
            return {}
        workers = self.world.gather_objects((*self.traffic, self._client.waited_s))
        servers = self.counts()
        now = Totals(workers, servers)
        before, self._measured_before = self._measured_before, now
        return now.since(before) if self.world.main_rank else {}

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients and weights that this worker has (sent, received)."""
        return self._client.traffic if self._client is not None else (0, 0)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        if self._protocol is None or self._client is None or not optimizers:
            return super().state_dict(module, optimizers)
        with self._protocol.whole_states(optimizers):
            state = super().state_dict(module, optimizers)
        if self._compresses:
            feedback = {"workers": self.world.gather_objects(self._protocol.kept()), "servers": self._client.lost()}
            state["kept"] = feedback
        if self._settings.outer != "nesterov":
            return state
        velocity = {id(p): moving for p, moving in zip(self._parameters, self._client.velocity(), strict=True)}
        flat = [velocity[id(p)].reshape(-1) for p in module.parameters() if id(p) in velocity]
        return {**state, "outer": {"0": torch.cat(flat)}}  # same format as `local_sgd` with a single fragment

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        protocol, client = self._protocol, self._client
        assert protocol is not None
        assert client is not None
        local = protocol.local_state()  # also waits for a background pull of weights
        kept = protocol.kept() if self._compresses else None
        lost = client.lost() if self._compresses and self.world.main_rank else ()
        return {**super().state_dict(module, optimizers), "own": local, "kept": kept, "lost": lost}

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        protocol, first = self._protocol, states[0]
        assert protocol is not None
        super().load_state_dict(first, module, optimizers)
        protocol.load_local_state([state["own"] for state in states])
        if self._compresses:
            protocol.server_feedback = first["lost"]  # of sums, for any number of workers
            if own:
                protocol.keep(first["kept"])
            else:
                warn_of_lost_residuals(self.world)
        protocol.starts(0)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        self._kept = state.get("kept")
        if isinstance(self._apart, LocalRounds):
            self._apart.velocity = self._velocity(module, state.get("outer", {}).get("0"))

    def _restore_feedback(self, protocol: WorkerProtocol) -> None:
        """Restore the error feedback of a checkpoint, if the numbers of workers and servers are the same."""
        kept, self._kept, protocol.server_feedback = self._kept, None, ()
        if kept is None:
            return
        if len(kept["workers"]) != self.world.size or len(kept["servers"]) != self.servers:
            if self.world.main_rank:
                warnings.warn(
                    f"the checkpoint was written with {len(kept['workers'])} workers and {len(kept['servers'])} "
                    "servers: the error feedback of compression is lost",
                    stacklevel=2,
                )
            return
        protocol.keep(kept["workers"][self.world.rank])
        protocol.server_feedback = kept["servers"]

    def _velocity(self, module: nn.Module, saved: Tensor | None) -> list[Tensor] | None:
        """Return the outer velocity of a checkpoint by parameter; None if it belongs to other parameters."""
        numbers = {id(parameter) for parameter in self._parameters}
        ordered = [parameter for parameter in module.parameters() if id(parameter) in numbers]
        if saved is None or saved.numel() != sum(parameter.numel() for parameter in ordered):
            return None
        parts = saved.split([parameter.numel() for parameter in ordered])
        by_id = {id(p): part.view(p.shape) for p, part in zip(ordered, parts, strict=True)}
        return [by_id[id(parameter)] for parameter in self._parameters]


def _warn_of_momentum(optimizers: Sequence[Optimizer], settings: Settings) -> None:
    """Warn of momentum, to which asynchronous delays add implicit momentum (Mitliagkas et al., Allerton 2016)."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    strongest = max((group.get("momentum", 0.0) for group in groups), default=0.0)
    if strongest >= 0.5 and settings.outer is None and not settings.aggregate and not settings.damp:
        warnings.warn(
            f"momentum={strongest} with gradients that are applied as they arrive, without damping: delays act like "
            "additional momentum, and training may diverge. Set damp=true, a small max_staleness, or less momentum",
            stacklevel=2,
        )
