"""Activations between the layers of a pair: tensors that a tensor-parallel group shards, with their global shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fabricx.distributed.world import World
from fabricx.model_parallel.placement import Placement
from fabricx.model_parallel.tensor_collectives import joined

_PARTS = "_fabricx_parts"  # attribute of a DTensor whose dim has the shards of several parts


@final
class Activations:
    """Converts between ordinary tensors and DTensors on the mesh of a tensor-parallel group.

    An ordinary tensor is equal on all ranks. User code sees global shapes of DTensors. The output of a fused projection
    has the shards of its parts side by side, in another order than the global tensor; it is marked with its parts, and
    `plain_order` restores the order.

    Args:
        world: ranks of the group.

    Attributes:
        world: ranks of the group.
        mesh: of these ranks.
        gathered: names of functions that were computed on gathered tensors, and how often.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.gathered: dict[str, int] = {}
        group: Any = world.group if world.group is not None else dist.group.WORLD
        self.mesh = DeviceMesh.from_group(group, world.device.type)

    def sharded(
        self, local: Tensor, dim: int, parts: tuple[int, ...] = (), shape: tuple[int, ...] | None = None
    ) -> DTensor:  # fmt: skip
        """Return this rank's shard as a tensor with its global shape.

        Args:
            local: shard of this rank.
            dim: that is sharded; 0 or more.
            parts: global sizes of parts in this dim, if there are several; the number of classes for logits.
            shape: global shape; None if all ranks' shards have the same size.
        """
        whole = None if shape is None else torch.empty(shape, device="meta")
        sizes: Any = {} if whole is None else {"shape": whole.shape, "stride": whole.stride()}
        tensor: DTensor = DTensor.from_local(local, self.mesh, [Shard(dim)], run_check=False, **sizes)
        if parts:
            setattr(tensor, _PARTS, (dim, parts))
        return tensor

    @staticmethod
    def parts_of(tensor: object) -> tuple[int, tuple[int, ...]] | None:
        """Return the dim and the sizes of the parts of a fused projection's output, or of logits; else None.

        Args:
            tensor: any object.
        """
        return getattr(tensor, _PARTS, None)

    def replicated(self, value: Any) -> Any:
        """Return an ordinary tensor as a DTensor; the backward sums over ranks. Other values are returned as they are.

        Args:
            value: anything.
        """
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
        return value

    def whole(self, value: Any) -> Any:
        """Return a DTensor as an ordinary tensor that is equal on all ranks; other values are returned as they are.

        Args:
            value: anything.
        """
        if not isinstance(value, DTensor):
            return value
        return self.plain_order(value).redistribute(placements=[Replicate()]).to_local()

    def plain_order(self, tensor: DTensor) -> DTensor:
        """Return a tensor whose shards are in the order of the global tensor, which is gathered if they are not.

        Args:
            tensor: maybe with parts.
        """
        marked = self.parts_of(tensor)
        if marked is None:
            return tensor
        dim, parts = marked
        if len(parts) == 1:
            whole: DTensor = self.replicated(joined(tensor.to_local(), self.world, parts[0]))
            return whole
        gathered = tensor.redistribute(placements=[Replicate()]).to_local()
        ranks = self.world.size
        placement = Placement((sum(parts),), 0, parts, ranks)
        rows = torch.arange(sum(parts), device=gathered.device).chunk(ranks)
        ordered: DTensor = self.replicated(gathered.index_select(dim, placement.join(rows)))
        return ordered

    def shard_of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a dim, as an ordinary tensor.

        Args:
            tensor: ordinary or DTensor.
            dim: 0 or more.
        """
        whole: DTensor = self.replicated(tensor)
        return self.plain_order(whole).redistribute(placements=[Shard(dim)]).to_local()

    def input_of(self, tensor: DTensor) -> Tensor:
        """Return a tensor as the whole input of sharded layers, whose backward sums over ranks.

        Args:
            tensor: with any placement.
        """
        whole = self.plain_order(tensor).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def dim_of(self, tensor: object) -> int | None:
        """Return the dim in which a tensor is sharded, in plain order; None if it is not sharded.

        Args:
            tensor: any object.
        """
        if not isinstance(tensor, DTensor) or self.parts_of(tensor) is not None:
            return None
        placement = tensor.placements[0]
        return placement.dim if isinstance(placement, Shard) else None

    def is_even(self, tensors: Sequence[object]) -> bool:
        """Return whether all ranks have shards of the same size, so that an error occurs on all of them.

        Args:
            tensors: any objects.
        """
        dims = [(tensor, self.dim_of(tensor)) for tensor in tensors]
        return all(dim is None or tensor.shape[dim] % self.world.size == 0 for tensor, dim in dims)  # type: ignore[attr-defined]
