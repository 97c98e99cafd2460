"""Data parallelism with local steps of islands: groups of ranks that compute a step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.gradient_checks import check_dense
from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import Elastic, HoldsPart, KeepsLocalState, WrapsStep, as_part
from fabricx.distributed.world import World
from fabricx.model_parallel.gradient_sums import GradientSums


@final
class IslandSteps(GradientSums, KeepsLocalState):
    """Make local steps in each island, and combine the weights of the islands periodically.

    An island is a model group: its ranks hold stages, shards of matrices, or shards of the sequence, and make the same
    step. Gradients are averaged over its context ranks. A rank combines its weights with the ranks at the same place
    of the other islands.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.

    Args:
        data_strategy: combines weights along the data axis; not synchronous.
    """

    def __init__(self, data_strategy: Strategy) -> None:
        super().__init__()
        self.data_strategy = data_strategy
        self.traits = data_strategy.traits
        self._staged = False  # a pipeline, which calls `backward` for each microbatch, and `end_backward` at the end
        self._pending = False  # gradients of the window are not averaged yet

    def enter(self, world: World, module: nn.Module) -> None:
        """Begin a stage of a run.

        Args:
            world: all ranks, with the axes of the mesh.
            module: the user's module.
        """
        self._staged = world.axis("pipeline").size > 1
        super().enter(world.axis("context"), module)
        self.data_strategy.enter(world.axis("data"), module)

    def world_changed(self, world: World) -> None:
        """Continue with other process groups.

        Args:
            world: all ranks, with the axes of the mesh.
        """
        self._staged, self._pending = world.axis("pipeline").size > 1, False
        super().world_changed(world.axis("context"))
        as_part(self.data_strategy, Elastic).world_changed(world.axis("data"))

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        if self.world.size > 1:
            check_dense(module, "context with data='local_sgd'")
        super().setup(module, several_backwards=several_backwards)
        part = as_part(self.data_strategy, HoldsPart)
        part.absent, part.elements = self.absent, self.elements
        self.data_strategy.setup(module, several_backwards=several_backwards)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self.data_strategy.attach_optimizers(optimizers)

    def teardown(self) -> None:
        part = as_part(self.data_strategy, HoldsPart)
        part.absent, part.elements = (), {}
        self.data_strategy.teardown()
        super().teardown()

    # -- one step ------------------------------------------------------------------------------------------------

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        outputs = Strategy.forward_backward(self, step, backward, batch, index)
        self.end_backward()  # of earlier microbatches of the window, if this one has no loss
        return outputs

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        self.data_strategy.backward(loss, compute)
        self._pending = True
        if not self._staged:
            self.end_backward()

    def end_backward(self) -> None:
        if self._pending and self.ends_window:
            self._pending = False
            super().end_backward()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        joined = self.data_strategy.backward_without_data(example)
        if not self.in_batch:
            self.end_backward()  # of earlier microbatches of the window
        return joined

    def gather(self) -> None:
        """Restore the local weights before the first microbatch: a step of a pipeline must not change weights."""
        as_part(self.data_strategy, WrapsStep).wrap_step(_no_step)()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        super().sum_gradients(parameters)
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.world.size)

    def after_update(self, step: int) -> int:
        return self.data_strategy.after_update(step)

    # -- between the ranks, and state ----------------------------------------------------------------------------

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        self.data_strategy.synchronize(copies, ends=ends)
        super().synchronize(copies, ends=ends)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return self.data_strategy.state_dict(module, optimizers)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        self.data_strategy.load_state_dict(state, module, optimizers)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return as_part(self.data_strategy, KeepsLocalState).local_state_dict(module, optimizers)

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        as_part(self.data_strategy, KeepsLocalState).load_local_states(states, module, optimizers, own=own)


def _no_step() -> None:
    """Compute nothing, as a step that a strategy wraps."""
