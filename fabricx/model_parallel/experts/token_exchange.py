"""Differentiable all-to-all of rows: each rank sends rows to the ranks that compute them, in any numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.world import World


def exchanged(
    tensor: Tensor, world: World, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:  # fmt: skip
    """Send rows of a tensor to the ranks of a group, and return the rows of all ranks in order; not differentiable.

    Args:
        tensor: rows for rank 0, then those for rank 1, and so on.
        world: ranks of the group.
        sent: number of rows for each rank; None for equal numbers.
        received: number of rows from each rank; None for equal numbers.

    Raises:
        PeerLost: another rank has died.
    """
    rows = len(tensor) if received is None else sum(received)
    output = tensor.new_empty((rows, *tensor.shape[1:]))
    arriving, leaving = (None if counts is None else list(counts) for counts in (received, sent))
    try:
        dist.all_to_all_single(output, tensor.contiguous(), arriving, leaving, group=world.group)
    except RuntimeError as error:
        raise_peer_lost(error, f"rank {world.rank} of {world.size} of an expert-parallel group, all_to_all")
        raise
    return output


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, sent: list[int], received: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.world, ctx.sent, ctx.received = world, sent, received
        outputs = tuple(exchanged(tensor, world, sent, received) for tensor in tensors)
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(x for x, needs in zip(outputs, needed, strict=True) if not needs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.needs_input_grad[3:], strict=True)
        back = (exchanged(grad, ctx.world, ctx.received, ctx.sent) if needs else None for grad, needs in pairs)
        return None, None, None, *back


def exchange(
    tensors: Sequence[Tensor], world: World, sent: Sequence[int], received: Sequence[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    """Send rows to the ranks of a group; the backward sends the gradients of the rows back to their ranks.

    All tensors are a single node of the graph, so that all ranks send gradients in the same order.

    Args:
        tensors: rows for rank 0, then those for rank 1, and so on.
        world: ranks of the group.
        sent: number of rows for each rank.
        received: number of rows from each rank.

    Returns:
        the received rows of each tensor.
    """
    outputs: tuple[Tensor, ...] = _Exchange.apply(world, list(sent), list(received), *tensors)  # type: ignore[no-untyped-call]
    return outputs
