"""Data parallelism of a pipeline whose data ranks store parts of the weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.core.strategy import Traits
from fabricx.core.strategy_parts import ShardsWeights
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.sharding.grad_hooks import check_before_sharding
from fabricx.distributed.sharding.sharded_parameters import ShardedParameters
from fabricx.distributed.world import World
from fabricx.model_parallel.data_parallel.gradient_sums import GradientSums


class ShardedSums(GradientSums, ShardsWeights):
    """Gather the weights of a stage for the microbatches of a window; sum gradients into the parts of the data ranks.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020: stage
    1, and weights are stored in parts between updates. Within a window a rank has the whole weights and gradients of
    its stage, as each microbatch needs them again.
    """

    traits = Traits(sharded=True, elastic=True)

    def __init__(self) -> None:
        super().__init__()
        self._parts: ShardedParameters | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._training = False  # in a window

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if self.world.size > 1:
            check_before_sharding(module)
            self._parts = ShardedParameters(self.world, module, is_placeholder)

    def world_changed(self, world: World) -> None:
        """Shard over the new group of ranks; weights and optimizer states are lost, and have to be loaded.

        Args:
            world: the data ranks of this stage, as many as before.
        """
        super().world_changed(world)
        self._training = False
        self.unshard()
        if world.size > 1:
            assert self.module is not None
            self._parts = ShardedParameters(world, self.module, is_placeholder)
            self._parts.replace_in(self._optimizers)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers

    def teardown(self) -> None:
        self._parts, self._optimizers, self._training = None, (), False
        super().teardown()

    def gather(self) -> None:
        self._training = True
        self.gather_to_evaluate()

    def gather_to_evaluate(self) -> None:
        if self._parts is not None:
            self._parts.gather()

    def release(self) -> None:
        if self._parts is not None:  # within a window, backwards add to the gradients
            self._parts.release(keep_gradients=self._training)

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        super().synchronize(copies, ends=ends)
        self.reshard()  # callbacks write averages to the parts, which an evaluation within a window gathers

    def reduce_gradients(self, module: nn.Module) -> None:
        super().reduce_gradients(module)
        self._training = False
        self.release()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        super().sum_gradients([parameter for parameter in parameters if not parameter.dim()])
        if self._parts is not None:
            self._parts.reduce()

    def discard_window(self) -> None:
        self._training = False
        self.release()

    def sharded_parameters(self) -> dict[str, Tensor]:
        return dict(self._parts.shards()) if self._parts is not None else {}

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        state: Mapping[str, Any] = module.state_dict()
        whole = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in whole.items()}

    def reshard(self) -> None:
        if self._parts is not None:  # within a window, whose next microbatch gathers the weights again
            self._parts.release(keep_gradients=True)

    def unshard(self) -> None:
        """Reverse the sharding; the values of weights and optimizer states are lost."""
        if self._parts is not None:
            self._parts.undo(self._optimizers)
            self._parts = None
