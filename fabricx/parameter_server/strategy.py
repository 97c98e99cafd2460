"""The engine of all strategies with parameter servers; the named strategies are presets of it."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.consistency.weight_changes import WeightChanges
from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import (
    DealsData,
    Elastic,
    HasServers,
    HidesGradients,
    KeepsLocalState,
    MeasuresWaiting,
    WrapsStep,
)
from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.core.strategy_support.dealer import Dealer
from fabricx.core.strategy_support.gradient_checks import warn_of_lost_residuals
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.distributed.world import World
from fabricx.parameter_server.connection import Connection, Trained, connect, parameters_of
from fabricx.parameter_server.design import Design
from fabricx.parameter_server.options import LinkKind, ServerOptions
from fabricx.parameter_server.saved_state import loaded_rule, restore_feedback, saved_rule
from fabricx.parameter_server.sparse_embeddings import sparse_embeddings
from fabricx.parameter_server.totals import Totals
from fabricx.parameter_server.wire.messages import Counts, Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.dealer import LeaseDealer

_READ_FIRST: Final = 8  # first training steps in which weights are read to notice changes by `training_step`
_READ_EVERY: Final = 32  # steps between later readings


class ServedStrategy(
    ServerOptions, Strategy, DealsData, Elastic, HasServers, HidesGradients, KeepsLocalState, MeasuresWaiting, WrapsStep
):  # fmt: skip
    """Workers push gradients to servers, and pull weights or sums of gradients.

    A strategy is a dataclass: its options are fields, and its `__post_init__` ends with `_design_with`. The strategy
    translates the contract of `Strategy` to a protocol (`WorkerProtocol`: when to push and pull) and an exchange
    (`Exchange`: with servers, or without).
    """

    link: LinkKind  # of the types in both bases, the narrower

    def __post_init__(self) -> None:
        Strategy.__init__(self)
        super().__post_init__()

    def _design_with(
        self, settings: Settings, asynchronous: Asynchronous | None, *, servers_step: bool, rank: int | None = None
    ) -> None:  # fmt: skip
        """Store the design that follows from the options, and check that it is possible.

        Args:
            settings, asynchronous, servers_step, rank: see `Design`.

        Raises:
            ValueError: options exclude each other.
        """
        self._design = Design(settings, asynchronous, servers_step, rank)
        self._design.check(self)
        self._settings, self.traits = settings, self._design.traits
        self._dealer = None if asynchronous is None else LeaseDealer(asynchronous)
        self._use(Connection())
        self._parameters: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._several_backwards = False
        self._steps = 0  # training steps of this worker
        self._saved_feedback: Any = None  # error feedback from a checkpoint
        self._measured_before: Totals | None = None  # totals at the previous call of `measured`

    def _use(self, connection: Connection) -> None:
        """Exchange gradients through a connection from now on."""
        self._connection = connection
        self._protocol, self._exchange = connection.protocol, connection.exchange

    # -- set up -------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if several_backwards and (self._design.servers_step or self._dealer is not None):
            raise ValueError(
                "servers step once per batch, and a manually optimised module steps by itself: use "
                "strategy=parameter_server with optimizer=worker, strategy=ddp, or automatic optimization"
            )
        if self._dealer is not None and synchronised(module):
            raise ValueError(
                "SyncBatchNorm needs all ranks in each forward, but each rank works at its own pace: use BatchNorm "
                "(its statistics are pooled for validation and checkpoints), or strategy=ddp"
            )
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise ValueError(
                    f"{name} is complex, and servers support real numbers only: train torch.view_as_real of it, or "
                    "use strategy=ddp"
                )
        for tensor in (*module.parameters(), *module.buffers()):
            self.data_ranks.broadcast(tensor.data)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers, self._parameters = optimizers, parameters_of(optimizers)
        backup = self._settings.backup
        if backup and backup >= self.data_ranks.size and not self.world.newcomer:
            raise ValueError(
                f"backup_workers={backup} of {self.data_ranks.size} workers: an update needs a gradient of at "
                "least one other worker; set fewer backup workers, or more devices"
            )
        if self._dealer is not None and self.data_ranks.size > 1 and self.world.main_rank:
            _warn_of_momentum(optimizers, self._settings)
        if self._dealer is not None or not self.world.newcomer:
            self._connect()

    def _connect(self) -> None:
        """Connect with the present ranks."""
        trained = Trained(self.module, self._parameters, self._optimizers, self._several_backwards)
        self._use(connect(self, self._design, self.data_ranks, trained))

    def _disconnect(self, *, done: bool) -> None:
        self._connection.close(done=done)
        self._use(Connection())

    def on_train_start(self, step: int, ranks: int) -> None:
        feedback, self._saved_feedback, self._measured_before = self._saved_feedback, None, None
        restore_feedback(feedback, self._protocol, self.data_ranks, self.servers)
        self._protocol.start_training(step, ranks, self.module)

    def teardown(self) -> None:
        self._disconnect(done=True)
        self._parameters, self._optimizers = [], []
        super().teardown()

    def world_changed(self, world: World) -> None:
        self.world = world
        if self._dealer is not None:
            self._protocol.world = self.data_ranks
            return
        self._disconnect(done=False)
        self._connect()
        if self.traits.replicated:
            # Any version: only the workers count updates.
            self._protocol.start_training(0, self.data_ranks.size, self.module)

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def in_training(*args: Any) -> Any:
            with self._protocol.computing_gradient(), self._connection.reads:
                return step(*args)

        return in_training

    # -- one step -----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with super().accumulate():
            self._exchange.sends_early = False
            try:
                yield
            finally:
                self._exchange.sends_early = True

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        self._protocol.backward(compute or loss.backward, closing=self.ends_window)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        return self._protocol.exchange_gradient() if self.ends_window else True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        if self.norm_clipping_refused:
            raise ValueError(self.norm_clipping_refused)
        clipped = list(parameters)
        norm = self._protocol.clip_norm(clipped, max_norm)
        return super().clip_norm(clipped, max_norm) if norm is None else norm

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        clipped = list(parameters)
        if not self._protocol.clip_value(clipped, limit):
            super().clip_value(clipped, limit)

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        return super().gradient_norm(optimizers) if self._design.workers_step else None

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        return self._protocol.hooks_see_gradients()

    @property
    def hides_gradients(self) -> bool:  # type: ignore[override]
        return self._protocol.pushes_parts

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return self._protocol.nonfinite_gradients(parameters)

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._protocol.gradients.drop(parameters)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._protocol.optimizers.check_parameters()
        return self._protocol.step(optimizer, closure)

    def after_update(self, step: int) -> int:
        return self._protocol.finish_update(step)

    def pull_tables(self) -> None:
        weights = self._connection.tables
        if weights is not None and weights.lacks_rows:
            weights.pull_tables()

    def wait_for_weights(self, step: int) -> int:
        return self._protocol.await_weights(step)

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        """Compute gradients; weights that the step changes are an error if servers step.

        Args:
            step, backward, batch, index: see `Strategy.forward_backward`.

        Raises:
            ValueError: the step has changed weights that the next weights of the servers would overwrite, or frozen
                parameters, which each worker would have for itself.
        """
        checked = step if self._design.workers_step else functools.partial(self._without_changes, step)
        return super().forward_backward(checked, backward, batch, index)

    def _without_changes(self, step: Callable[..., Any], batch: Any, index: int) -> Any:
        pulls = self.weight_pulls
        reads = self._steps < _READ_FIRST or self._steps % _READ_EVERY == 0
        self._steps += 1
        changes, frozen = WeightChanges(self._parameters, values=reads), self._frozen_parameters()
        frozen_changes = WeightChanges(frozen.values(), values=reads)
        outputs = step(batch, index)
        changed_frozen = frozen_changes.first(frozen.values())
        if changed_frozen is not None:
            raise ValueError(
                f"training_step changes {list(frozen)[changed_frozen]}, a frozen parameter that servers don't hold, so "
                "each worker would have its own values: register it as a buffer, or use strategy=local_sgd, which "
                "averages frozen parameters, or strategy=ddp"
            )
        changed = changes.first(self._parameters) if self.overwrites else None
        if changed is not None and self.weight_pulls == pulls:  # a pull within the forward writes weights, too
            raise ValueError(
                f"training_step changes {self._names(self.module)[changed]}, but servers hold the weights, so a "  # type: ignore[arg-type]
                "worker's change would be lost: compute the changed weights from the parameters in each forward, or "
                "use strategy=ddp, where all ranks have to change them alike"
            )
        return outputs

    def _frozen_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the module that no optimizer has, by name."""
        assert self.module is not None
        known = set(map(id, self._parameters))
        return {name: parameter for name, parameter in self.module.named_parameters() if id(parameter) not in known}

    # -- properties for the loop --------------------------------------------------------------------------------

    @property
    def dealer(self) -> Dealer:
        return super().dealer if self._dealer is None else self._dealer

    @property
    def waits_for_servers(self) -> bool:  # type: ignore[override]
        return self.servers > 0

    @property
    def global_updates(self) -> bool:  # type: ignore[override]
        return self._design.whole_updates

    @property
    def updates_per_batch(self) -> int:
        if self._dealer is None or self._design.whole_updates:
            return 1
        return self._dealer.planned or self.data_ranks.size

    @property
    def norm_clipping_refused(self) -> str:  # type: ignore[override]
        return self._design.norm_clipping_refused(self.servers, self.data_ranks.size)

    @property
    def batch_weight_refused(self) -> str:  # type: ignore[override]
        return self._design.batch_weight_refused

    @property
    def lost_with_worker(self) -> list[str]:
        return self._design.lost_with_worker

    # -- moving averages ----------------------------------------------------------------------------------------

    def keep_average(
        self, rule: AverageRule, step: int, averages: Mapping[str, Tensor], updates: int = 0
    ) -> frozenset[str]:
        if self.module is None or not self._servers_see_more:
            return frozenset()
        names = self._names(self.module)
        if self.world.main_rank and not self.world.newcomer:
            present = [averages.get(name, p) for name, p in zip(names, self._parameters, strict=True)]
            self._exchange.remote.keep_average(rule, step, present, updates)
        return frozenset(names)

    def read_average(self) -> tuple[dict[str, Tensor], int]:
        if self.module is None or not self._exchange.connected:
            return {}, 0
        averages, updates = self._exchange.remote.averages()
        return dict(zip(self._names(self.module), averages, strict=True)), updates

    @property
    def _servers_see_more(self) -> bool:
        """Return whether a worker's weights lack some updates, or a part of an update."""
        if not self._design.servers_step or not self.servers:
            return False
        tables = sparse_embeddings(self.module, self._parameters)
        return self._dealer is not None or self._settings.pull_compression is not None or bool(tables)

    def _names(self, module: nn.Module) -> list[str]:
        """Return the names of the servers' parameters, in order."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names.get(id(p), f"#{number}") for number, p in enumerate(self._parameters)]

    # -- statistics ---------------------------------------------------------------------------------------------

    def counts(self) -> list[Counts]:
        """Return the statistics of each server: updates, staleness, dropped gradients."""
        return self._exchange.remote.counts()

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients and weights that this worker has (sent, received)."""
        return self._exchange.traffic

    @property
    def weight_pulls(self) -> int | None:  # type: ignore[override]
        return None if self._design.workers_step else self._exchange.statistics.pulls

    @property
    def overwrites(self) -> bool:  # type: ignore[override]
        return self.servers_step and self._settings.outer is None

    @property
    def shares_update(self) -> bool:  # type: ignore[override]
        return self._protocol.shares_update

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self._exchange.statistics.waited_s

    @property
    def pushed_s(self) -> float:  # type: ignore[override]
        return self._exchange.statistics.pushed_s

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        return self._exchange.statistics.pushes

    def measured(self) -> dict[str, float]:
        if not self._exchange.connected:
            return {}
        now = Totals(self.data_ranks.gather_objects((*self.traffic, self.waited_s)), self.counts())
        before, self._measured_before = self._measured_before, now
        return now.since(before) if self.world.main_rank else {}

    # -- between the ranks, and checkpoints -----------------------------------------------------------------------

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        self._protocol.meet()
        self._protocol.pool_statistics()
        super().synchronize(copies, ends=ends)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        if not optimizers or not self._exchange.connected:
            return super().state_dict(module, optimizers)
        with self._protocol.whole_states():
            state = super().state_dict(module, optimizers)
        remote = self._exchange.remote
        if self._design.compresses:
            state["kept"] = {
                "workers": self.data_ranks.gather_objects(self._protocol.error_feedback()),
                "servers": remote.error_feedback(),
            }
        if self._settings.outer == "nesterov" or self._settings.compensation == "dc-adaptive":
            state |= saved_rule(module, self._parameters, *remote.rule())
        return state

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        self._saved_feedback = state.get("kept")
        self._protocol.server_rule = loaded_rule(module, self._parameters, state)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        local = self._protocol.local_state()  # also waits for a background pull of weights
        kept = self._protocol.error_feedback() if self._design.compresses else None
        lost = self._exchange.remote.error_feedback() if self._design.compresses and self.world.main_rank else ()
        return {**super().state_dict(module, optimizers), "own": local, "kept": kept, "lost": lost}

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        protocol, first = self._protocol, states[0]
        super().load_state_dict(first, module, optimizers)
        protocol.load_local_state([state["own"] for state in states])
        if self._design.compresses:
            protocol.server_feedback = first["lost"]  # of sums, for any number of workers
            if own:
                protocol.load_error_feedback(first["kept"])
            else:
                warn_of_lost_residuals(self.world)
        protocol.start_training(0, self.data_ranks.size, module)

    def unchanged(self, module: nn.Module, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
        return nullcontext()  # the residuals that a checkpoint sends stay sent


def _warn_of_momentum(optimizers: Sequence[Optimizer], settings: Settings) -> None:
    """Warn of momentum, to which asynchronous delays add implicit momentum (Mitliagkas et al., Allerton 2016)."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    strongest = max((group.get("momentum", 0.0) for group in groups), default=0.0)
    if strongest >= 0.5 and settings.outer is None and not settings.aggregate and not settings.damp:
        warnings.warn(
            f"momentum={strongest}: gradients are applied as they arrive, without damping, and delays act like "
            "additional momentum, so training may diverge. Set damp=true, a small max_staleness, or less momentum",
            stacklevel=2,
        )
