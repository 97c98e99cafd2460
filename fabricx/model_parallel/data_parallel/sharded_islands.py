"""Data parallelism with local steps of islands that shard the weights over their data ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import (
    AddsAxes,
    Elastic,
    HoldsPart,
    KeepsLocalState,
    MeasuresWaiting,
    ShardsWeights,
    WrapsStep,
    as_part,
)  # fmt: skip
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.distributed.world import World


@final
class ShardedIslands(Strategy, AddsAxes, Elastic, HoldsPart, KeepsLocalState, MeasuresWaiting, WrapsStep):
    """Make local steps in islands that shard weights, gradients and optimizer states, and combine their shards.

    A rank combines its shards with the ranks at its place of all islands, so that no rank has whole weights.

    Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105;
    Rajbhandari et al., "ZeRO", SC 2020.

    Args:
        rounds: combines the weights of islands; not synchronous.
        sharding: shards the weights over the ranks of an island. It has the other parts (`as_part`).
    """

    def __init__(self, rounds: Strategy, sharding: Strategy) -> None:
        super().__init__()
        self.rounds = rounds
        self.data_strategy: Strategy = sharding
        self.traits = replace(rounds.traits, sharded=True)

    # -- set up --------------------------------------------------------------------------------------------------

    def enter(self, world: World, module: nn.Module) -> None:
        """Begin a stage of a run.

        Args:
            world: all ranks, with the axes of the mesh.
            module: the user's module.
        """
        super().enter(world, module)
        self.data_strategy.enter(world.axis("island_gradients"), module)
        self.rounds.enter(between_islands(world), module)

    def world_changed(self, world: World) -> None:
        self.world = world
        as_part(self.data_strategy, Elastic).world_changed(world.axis("island_gradients"))
        as_part(self.rounds, Elastic).world_changed(between_islands(world))

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        if synchronised(module):
            raise ValueError(
                "SyncBatchNorm with shard: it computes statistics over all ranks in each step, and islands step "
                "independently; remove sync_batchnorm, or use another normalisation"
            )
        super().setup(module)
        self.data_strategy.setup(module)
        part = as_part(self.rounds, HoldsPart)
        part.absent, part.elements = self.absent, self.elements
        self.rounds.setup(module)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self.data_strategy.attach_optimizers(optimizers)
        self.rounds.attach_optimizers(optimizers)

    def teardown(self) -> None:
        part = as_part(self.rounds, HoldsPart)
        part.absent, part.elements = self.absent, self.elements = (), {}
        self.rounds.teardown()
        self.data_strategy.teardown()
        super().teardown()

    # -- one step ------------------------------------------------------------------------------------------------

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        sharded = as_part(self.data_strategy, WrapsStep).wrap_step(step)

        def with_local_weights(*args: Any) -> Any:
            self._restore_local()
            return sharded(*args)

        return with_local_weights

    def wrap_evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return as_part(self.data_strategy, WrapsStep).wrap_evaluation(step)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with super().accumulate(), self.data_strategy.accumulate():
            yield

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        self.rounds.backward(loss, functools.partial(self.data_strategy.backward, loss, compute))

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        self._restore_local()
        joined = False

        def compute() -> None:
            nonlocal joined
            joined = self.data_strategy.backward_without_data(example)

        self.rounds.backward(torch.zeros(()), compute)  # notes the parameters with a gradient of other ranks
        if self.ends_window and self.module is not None and all(p.grad is None for p in self.module.parameters()):
            self.rounds.backward_without_data()  # no rank of this island has a sample
        return joined

    def discard_window(self) -> None:
        self.data_strategy.discard_window()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        return self.data_strategy.clip_norm(parameters, max_norm)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return self.data_strategy.optimizer_step(optimizer, closure)

    def after_update(self, step: int) -> int:
        return self.rounds.after_update(self.data_strategy.after_update(step))

    def _restore_local(self) -> None:
        """Restore the local weights after a validation, before the weights of a block are gathered."""
        self._reshard()
        as_part(self.rounds, WrapsStep).wrap_step(_no_step)()

    def _reshard(self) -> None:
        """Free gathered weights: changes of the shards would not reach them."""
        as_part(self.data_strategy, ShardsWeights).reshard()

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return sum(as_part(part, MeasuresWaiting).waited_s for part in (self.rounds, self.data_strategy))

    def record_pauses(self, mark: Callable[[], Any]) -> list[tuple[Any, Any]]:
        return as_part(self.data_strategy, MeasuresWaiting).record_pauses(mark)

    # -- between the ranks, and state ----------------------------------------------------------------------------

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        self._reshard()
        self.rounds.synchronize(copies, ends=ends)
        self.data_strategy.synchronize(copies, ends=ends)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self._reshard()
        return self.rounds.state_dict(module, optimizers)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        self._reshard()
        self.rounds.load_state_dict(state, module, optimizers)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self._reshard()
        return as_part(self.rounds, KeepsLocalState).local_state_dict(module, optimizers)

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        refuse_other_ranks(same_ranks=own)
        self._reshard()
        as_part(self.rounds, KeepsLocalState).load_local_states(states, module, optimizers, own=own)


def between_islands(world: World) -> World:
    """Return the data ranks, with the ranks that have the same shards in all islands.

    Args:
        world: all ranks, with the axes of the mesh.
    """
    return replace(world.axis("data"), axes={"islands": world.axis("islands")})


def refuse_other_ranks(*, same_ranks: bool) -> None:
    """Refuse in-memory checkpoints of another number of ranks.

    Args:
        same_ranks: the number of ranks is that of the in-memory checkpoints.

    Raises:
        ValueError: it is another.
    """
    if not same_ranks:
        raise ValueError(
            "the number of ranks has changed, and in-memory checkpoints of islands with shard are for as many ranks as "
            "before: resume from a checkpoint on disk, or start as many ranks"
        )


def _no_step() -> None:
    """Compute nothing, as a step that a strategy wraps."""
