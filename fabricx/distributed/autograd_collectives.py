"""Differentiable collectives over the current process group; torch's own keep the group of their import."""

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
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        total: Tensor = gradients[0].clone()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def sum_of_all(tensor: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, whose shape stays; a gradient is the sum of all ranks' gradients."""
    total: Tensor = _Sum.apply(tensor)  # type: ignore[no-untyped-call]
    return total


def gather(tensor: Tensor) -> Tensor:
    """Return all ranks' tensors, shape [ranks, ...]; a gradient is the sum of what all ranks have for this one's."""
    gathered: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
    return gathered
