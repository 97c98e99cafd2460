"""Differentiable collectives over the current default process group.

`torch.distributed.nn` binds the default group at import, which is stale after a new generation of ranks has formed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        total: Tensor = gradients[0].clone()
        dist.all_reduce(total)
        return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.resolve_conj().contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        total: Tensor = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def sum_of_all(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks; the backward sums the gradients of all ranks.

    Args:
        tensor: same shape on all ranks.
    """
    total: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return total


def gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the tensors of all ranks; the backward sums the gradients of all ranks for this rank's tensor.

    Args:
        tensor: same shape on all ranks.
        group: process group of the ranks; None for all ranks.

    Returns:
        Tensor of shape [ranks, ...].
    """
    gathered: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return gathered
