"""Data parallelism with local steps of islands that are pipelines, and shard the weights of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy import Strategy
from fabricx.distributed.world import World
from fabricx.model_parallel.data_parallel.island_steps import IslandSteps
from fabricx.model_parallel.data_parallel.sharded_islands import between_islands, refuse_other_ranks
from fabricx.model_parallel.data_parallel.sharded_sums import ShardedSums


@final
class ShardedStages(IslandSteps, ShardedSums):
    """Make local steps in islands of several pipelines, whose ranks at a stage store parts of its weights.

    A rank combines its parts with the ranks at its place of all islands. Within a window it has the whole weights of
    its stage, which each microbatch needs.

    Args:
        rounds: combines the weights of islands; not synchronous.
    """

    def __init__(self, rounds: Strategy) -> None:
        super().__init__(rounds)
        self.traits = replace(rounds.traits, sharded=True)

    def combining(self, world: World) -> World:
        return between_islands(world)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        ShardedSums.attach_optimizers(self, optimizers)
        super().attach_optimizers(optimizers)

    # Rounds read and change the parts, of which gathered weights are copies.

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        self.reshard()
        super().synchronize(copies, ends=ends)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self.reshard()
        return super().state_dict(module, optimizers)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        self.reshard()
        super().load_state_dict(state, module, optimizers)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self.reshard()
        return super().local_state_dict(module, optimizers)

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        refuse_other_ranks(same_ranks=own)
        self.reshard()
        super().load_local_states(states, module, optimizers, own=own)
