"""Differentiable collectives of a tensor-parallel group.

Source: f and g of Megatron-LM (Shoeybi et al., 2019, section 3): one is the identity forward and a sum backward, the
other the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.distributed.lost_peers import raise_peer_lost
from fabricx.distributed.world import World
from fabricx.model_parallel.placement import share


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
        dist.all_gather(parts, tensor.contiguous(), group=world.group)
    except RuntimeError as error:
        raise_peer_lost(error, f"rank {world.rank} of {world.size} of a tensor-parallel group, all_gather")
        raise
    return parts


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
    def forward(ctx: Any, tensor: Tensor, world: World, features: int) -> Tensor:
        ctx.world, ctx.features = world, features
        each = -(-features // world.size)
        parts = gathered(F.pad(tensor, (0, each - tensor.shape[-1])), world)
        return torch.cat(parts, -1)[..., :features].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        begin, end = share(ctx.features, ctx.world.rank, ctx.world.size)
        return gradients[0][..., begin:end].contiguous(), None, None


def copied(tensor: Tensor, world: World) -> Tensor:
    """Return a tensor that is equal on all ranks, as the input of sharded layers; the backward sums over ranks.

    Args:
        tensor: equal on all ranks.
        world: ranks of the group.
    """
    output: Tensor = _Copy.apply(tensor, world)  # type: ignore[no-untyped-call]
    return output


def summed(tensor: Tensor, world: World) -> Tensor:
    """Return the sum over ranks; the backward is the identity.

    Args:
        tensor: summand of this rank.
        world: ranks of the group.
    """
    output: Tensor = _Sum.apply(tensor, world)  # type: ignore[no-untyped-call]
    return output


def joined(tensor: Tensor, world: World, features: int) -> Tensor:
    """Return the features of all ranks; the backward selects this rank's features.

    Args:
        tensor: features of this rank in the last dim, as `share` divides them.
        world: ranks of the group.
        features: of all ranks.
    """
    output: Tensor = _Gather.apply(tensor, world, features)  # type: ignore[no-untyped-call]
    return output
