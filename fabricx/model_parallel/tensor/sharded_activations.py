"""Conversion between ordinary tensors, which are equal on all ranks, and sharded activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.model_parallel.placement import Placement
from fabricx.model_parallel.tensor.collectives import copied, joined, joined_input, sliced
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


@final
class Activations:
    """Converts activations of a tensor-parallel group.

    Args:
        world, weight_of: see the attributes.

    Attributes:
        world: ranks of the group.
        gathered: names of functions that were computed on gathered tensors, and how often.
        weight_of: returns the name of the weight that has the memory of a shard; "" if none has.
        own_streams: dropout inside of attention draws from a stream of each rank, on all devices.
    """

    def __init__(self, world: World, weight_of: Callable[[Tensor], str] = lambda shard: "") -> None:
        self.world, self.weight_of = world, weight_of
        self.gathered: dict[str, int] = {}
        self.own_streams = False

    def sharded(
        self, local: Tensor, dim: int, parts: tuple[int, ...] = (), shape: Sequence[int] | None = None
    ) -> ShardedTensor:  # fmt: skip
        """Return this rank's shard as a tensor with the shape of the whole tensor.

        Args:
            local: shard of this rank.
            dim: dimension that is sharded; 0 or more.
            parts: sizes of the parts of a fused projection; the number of classes for logits.
            shape: shape of the whole tensor; None if all ranks' shards have the same size.
        """
        if shape is None:
            shape = list(local.shape)
            shape[dim] *= self.world.size
        return ShardedTensor(local, dim, tuple(shape), parts)

    def is_even(self, tensor: ShardedTensor) -> bool:
        """Return whether all ranks have shards of the same size.

        Args:
            tensor: sharded.
        """
        return tensor.shape[tensor.sharded_dim] % self.world.size == 0

    def whole(self, value: Any) -> Any:
        """Return a sharded tensor as an ordinary tensor; other values are returned as they are.

        Args:
            value: anything.
        """
        if not isinstance(value, ShardedTensor):
            return value
        value.check_usable()
        dim, size = value.sharded_dim, value.shape[value.sharded_dim]
        gathered = joined(value.local, self.world, size, dim)
        if len(value.parts) < 2:
            return gathered
        placement = Placement((size,), 0, value.parts, self.world.size)
        rows = torch.arange(size, device=gathered.device).chunk(self.world.size)
        return gathered.index_select(dim, placement.join(rows))

    def in_order(self, value: Any) -> Any:
        """Return the output of a fused projection, or logits, as an ordinary tensor; other values as they are.

        Args:
            value: anything.
        """
        return self.whole(value) if isinstance(value, ShardedTensor) and value.parts else value

    def shard_of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a dim, as an ordinary tensor.

        Args:
            tensor: ordinary or sharded.
            dim: 0 or more.
        """
        tensor = self.in_order(tensor)
        if isinstance(tensor, ShardedTensor) and tensor.sharded_dim == dim:
            tensor.check_usable()
            return tensor.local
        return sliced(self.whole(tensor), self.world, dim)

    def input_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the whole input of sharded computations, whose backward sums over ranks.

        Args:
            tensor: ordinary or sharded.
        """
        tensor = self.in_order(tensor)
        if not isinstance(tensor, ShardedTensor):
            return copied(tensor, self.world) if tensor.requires_grad else tensor
        tensor.check_usable()
        size = tensor.shape[tensor.sharded_dim]
        return joined_input(tensor.local, self.world, size, tensor.sharded_dim)
