"""Data parallelism with local steps of islands: groups of ranks that compute a step together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import AddsAxes, Elastic, HoldsPart, KeepsLocalState, WrapsStep, as_part
from fabricx.core.strategy_support.gradient_checks import check_dense
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.distributed.world import World
from fabricx.model_parallel.data_parallel.gradient_sums import GradientSums


class IslandSteps(GradientSums, AddsAxes, KeepsLocalState):
    """Make local steps in each island, and combine the weights of the islands periodically.

    An island is a model group (ranks with stages, shards of matrices or of the sequence), or several with different
    data. Its ranks make the same step: gradients are averaged over replicas and context ranks. A rank
    combines its weights with the ranks at its place of all model groups; those of an island have equal weights.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.

    Args:
        data_strategy: combines weights along the data axis; not synchronous.
    """

    def __init__(self, data_strategy: Strategy) -> None:
        super().__init__()
        self.data_strategy: Strategy = data_strategy
        self.traits = data_strategy.traits
        self._staged = False  # a pipeline, which calls `backward` for each microbatch, and `end_backward` at the end
        self._replicated = False  # several model groups in an island, of which some may have no sample or loss
        self._pending = False  # gradients of the window are not averaged yet

    def enter(self, world: World, module: nn.Module) -> None:
        """Begin a stage of a run.

        Args:
            world: all ranks, with the axes of the mesh.
            module: the user's module.
        """
        self._note(world)
        super().enter(world.axis("island_gradients"), module)
        self.data_strategy.enter(self.combining(world), module)

    def world_changed(self, world: World) -> None:
        self._note(world)
        super().world_changed(world.axis("island_gradients"))
        as_part(self.data_strategy, Elastic).world_changed(self.combining(world))

    def _note(self, world: World) -> None:
        self._staged, self._replicated = world.axis("pipeline").size > 1, world.axis("island_data").size > 1
        self._pending = False

    def combining(self, world: World) -> World:
        """Return the ranks that combine their weights.

        Args:
            world: all ranks, with the axes of the mesh.
        """
        return world.axis("data")

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        if self.world.size > 1:
            check_dense(module, "replicas or context with data='local_sgd'")
        if self._replicated and synchronised(module):
            raise ValueError(
                "SyncBatchNorm with replicas or shard: it computes statistics over all ranks in each step, and islands "
                "step independently; remove sync_batchnorm, or use another normalisation"
            )
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
        self._pending |= self._replicated
        outputs = Strategy.forward_backward(self, step, backward, batch, index)
        self.end_backward()  # if this batch has no loss
        return outputs

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        def computed() -> None:
            (compute or loss.backward)()
            self._pending = True
            if not self._staged:
                self.end_backward()

        self.data_strategy.backward(loss, computed)

    def end_backward(self) -> None:
        if not (self._pending and self.ends_window) or self.module is None:
            return
        self._pending = False
        reduce = functools.partial(self.reduce_gradients, self.module)
        self.data_strategy.backward(torch.zeros(()), reduce)  # notes the parameters with a gradient of any replica
        if self._replicated and all(p.grad is None for p in self.module.parameters()):  # no replica has a sample
            self.data_strategy.backward_without_data()
        if self.reduce_shared is not None:  # last, since it gives shared parameters a gradient on other stages
            self.reduce_shared()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        if self._replicated:
            joined = True
            self.gather()
        else:
            joined = self.data_strategy.backward_without_data(example)
        if not self.in_batch:
            self.end_backward()  # of earlier microbatches of the window, and of the replicas
        return joined

    def gather(self) -> None:
        """Restore the local weights before the first microbatch: a step of a pipeline must not change weights."""
        as_part(self.data_strategy, WrapsStep).wrap_step(_no_step)()
        super().gather()
        self._pending |= self._replicated

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if gradients := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_div_(gradients, self.world.size)
        super().sum_gradients(parameters)

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
