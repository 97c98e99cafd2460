"""Differentiable collectives of a tensor-parallel group.

Source: f and g of Megatron-LM (Shoeybi et al., 2019, section 3): one is the identity forward and a sum backward, the
other the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.world import World
from fabricx.model_parallel.placement import Placement, share


def reduced(tensor: Tensor, world: World) -> Tensor:
    """Return the sum over all ranks of a group; not differentiable.

    Args:
        tensor: same shape on all ranks; not changed.
        world: ranks of the group.

    Raises:
        PeerLost: another rank has died.
    """
    total = tensor.contiguous().clone() if tensor.is_contiguous() else tensor.contiguous()
    try:
        dist.all_reduce(total, group=world.group)
    except RuntimeError as error:
        raise_peer_lost(error, f"rank {world.rank} of {world.size} of a tensor-parallel group, all_reduce")
        raise
    return total


def gathered(tensor: Tensor, world: World) -> list[Tensor]:
    """Return the tensors of all ranks of a group; not differentiable.

    Args:
        tensor: same shape on all ranks.
        world: ranks of the group.

    Raises:
        PeerLost: another rank has died.
    """
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world.size)]
    try:
        dist.all_gather([as_bytes(part) for part in parts], as_bytes(tensor), group=world.group)
    except RuntimeError as error:
        raise_peer_lost(error, f"rank {world.rank} of {world.size} of a tensor-parallel group, all_gather")
        raise
    return parts


def scattered(tensor: Tensor, world: World, dim: int) -> Tensor:
    """Return this rank's shard of the sum over all ranks; not differentiable.

    Args:
        tensor: same shape on all ranks.
        world: ranks of the group.
        dim: dimension to shard.

    Raises:
        PeerLost: another rank has died.
    """
    size = tensor.shape[dim]
    largest = -(-size // world.size)
    rows = tensor.movedim(dim, 0)
    if largest * world.size != size:
        rows = torch.cat([rows, rows.new_zeros((largest * world.size - size, *rows.shape[1:]))])
    total = rows.new_empty((largest, *rows.shape[1:]))
    # torch 2.13 has a new name for it and warns about the old name.
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        reduce_scatter(total, rows.contiguous(), group=world.group)
    except RuntimeError as error:
        raise_peer_lost(error, f"rank {world.rank} of {world.size} of a tensor-parallel group, reduce_scatter")
        raise
    begin, end = share(size, world.rank, world.size)
    shard = total[: end - begin].movedim(0, dim)
    # `contiguous` would keep the strides of a shard of one row, from which those of the whole tensor follow.
    return shard.clone(memory_format=torch.contiguous_format) if dim else shard


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return reduced(gradients[0], ctx.world), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        return reduced(tensor, world)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World, size: int, dim: int) -> Tensor:
        ctx.world, ctx.size, ctx.dim = world, size, dim
        return _joined(tensor, world, size, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        return _shard(gradients[0], ctx.world, ctx.dim).contiguous(), None, None, None


class _GatherInput(_Gather):
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        return scattered(gradients[0], ctx.world, ctx.dim), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World, dim: int) -> Tensor:
        ctx.world, ctx.size, ctx.dim = world, tensor.shape[dim], dim
        return _shard(tensor, world, dim).clone()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return _joined(gradients[0], ctx.world, ctx.size, ctx.dim), None, None


class _ScatterSum(_Slice):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World, dim: int) -> Tensor:
        ctx.world, ctx.size, ctx.dim = world, tensor.shape[dim], dim
        return scattered(tensor, world, dim)


def _shard(tensor: Tensor, world: World, dim: int) -> Tensor:
    """Return this rank's shard, as a view."""
    begin, end = share(tensor.shape[dim], world.rank, world.size)
    return tensor.narrow(dim, begin, end - begin)


def _joined(tensor: Tensor, world: World, size: int, dim: int) -> Tensor:
    """Return the shards of all ranks side by side; shards are padded to the largest, since gloo needs equal sizes."""
    largest = -(-size // world.size)
    missing = largest - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    whole = torch.cat(gathered(tensor, world), dim)
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).clone()


def _applied(function: Any, *arguments: Any) -> Tensor:
    output: Tensor = function.apply(*arguments)
    return output


def copied(tensor: Tensor, world: World) -> Tensor:
    """Return a tensor that is equal on all ranks, as the input of sharded layers; the backward sums over ranks.

    Args:
        tensor: equal on all ranks.
        world: ranks of the group.
    """
    return _applied(_Copy, tensor, world)


def summed(tensor: Tensor, world: World) -> Tensor:
    """Return the sum over ranks; the backward is the identity.

    Args:
        tensor: summand of this rank.
        world: ranks of the group.
    """
    return _applied(_Sum, tensor, world)


def joined(tensor: Tensor, world: World, size: int, dim: int) -> Tensor:
    """Return the shards of all ranks as an ordinary tensor; the backward selects this rank's shard.

    Args:
        tensor: shard of this rank, as `share` divides the dim.
        world: ranks of the group.
        size: size of the dim, over all ranks.
        dim: dimension that is sharded.
    """
    return _applied(_Gather, tensor, world, size, dim)


def sliced(tensor: Tensor, world: World, dim: int) -> Tensor:
    """Return this rank's shard of an ordinary tensor; the backward gathers the gradients of all ranks.

    Args:
        tensor: equal on all ranks.
        world: ranks of the group.
        dim: dimension to shard.
    """
    if not tensor.requires_grad:
        return _shard(tensor, world, dim)
    return _applied(_Slice, tensor, world, dim)


def joined_input(tensor: Tensor, world: World, size: int, dim: int) -> Tensor:
    """Return the shards of all ranks as the input of sharded layers; the backward sums over ranks, and shards the sum.

    Args:
        tensor: shard of this rank.
        world: ranks of the group.
        size: size of the dim, over all ranks.
        dim: dimension that is sharded.
    """
    return _applied(_GatherInput, tensor, world, size, dim)


def scattered_sum(tensor: Tensor, world: World, dim: int) -> Tensor:
    """Return this rank's shard of the sum over ranks; the backward gathers the gradients of all ranks.

    Args:
        tensor: summand of this rank.
        world: ranks of the group.
        dim: dimension to shard.
    """
    return _applied(_ScatterSum, tensor, world, dim)


def whole_tensor(placement: Placement | None, local: Tensor, world: World) -> Tensor:
    """Return the whole of a divided tensor; not differentiable. All ranks of the group call it.

    Args:
        placement: of the tensor; None for a tensor that is not divided.
        local: this rank's part; a tensor of another shape, such as a step count, is returned as it is.
        world: ranks of the group.
    """
    if placement is None or tuple(local.shape) != placement.local_shape(world.rank):
        return local
    if world.size == 1:
        return local.detach()
    padded = local.detach().new_zeros(placement.local_shape(0))
    padded[tuple(slice(size) for size in local.shape)] = local.detach()
    shards = []
    for rank, shard in enumerate(gathered(padded, world)):
        shards.append(shard[tuple(slice(size) for size in placement.local_shape(rank))])
    return placement.join(shards)
