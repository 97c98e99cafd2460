"""Gradient clipping over the whole model, for parameters with any placement on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fabricx.core.strategy_support.gradient_checks import SPARSE_CLIPPED
from fabricx.core.tensors.complex_numbers import as_real
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.world import World


def clip_norm(
    parameters: Iterable[Tensor], max_norm: float, world: World, copies: Callable[[Tensor], float]
) -> Tensor:  # fmt: skip
    """Scale gradients down to a 2-norm of at most `max_norm`; each element counts once. One all-reduce.

    Args:
        parameters: this rank's parameters, with gradients that are complete.
        max_norm: limit.
        world: all ranks that have parts of the model.
        copies: number of ranks of `world` that have the same elements of a parameter's gradient.

    Returns:
        the norm before, shape [], equal on all ranks.

    Raises:
        ValueError: a gradient is sparse.
    """
    local = list(parameters)
    gradients = [_local(p.grad) for p in local if p.grad is not None]
    norm = _total(local, world, copies)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_; without a wait for the device
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return _as_weights(norm, local)


def total_norm(parameters: Iterable[Tensor], world: World, copies: Callable[[Tensor], float]) -> Tensor:
    """Return the 2-norm of gradients, shape []; each element counts once, also of sparse gradients. One all-reduce.

    Args:
        parameters: this rank's parameters, with gradients that are complete.
        world: all ranks that have parts of the model.
        copies: number of ranks of `world` that have the same elements of a parameter's gradient.
    """
    local = list(parameters)
    return _as_weights(_total(local, world, copies), local)


def _total(parameters: Sequence[Tensor], world: World, copies: Callable[[Tensor], float]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else _local(gradient)
            norm = torch.linalg.vector_norm(as_real(values), dtype=torch.float64)  # without a copy in float64
            total += norm.square().to(total.device) / copies(parameter)
    return world.all_reduce(total).sqrt()


def _as_weights(norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return a norm in the precision of the weights."""
    dtypes = {parameter.dtype for parameter in parameters}  # not of gradients: a stage may have none
    if len(dtypes) <= 1:
        return norm.to(dtypes.pop()) if dtypes else norm
    return norm.to(torch.get_default_dtype())


def clip_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clip each element of this rank's gradients to [-limit, limit].

    Args:
        parameters: parameters with gradients.
        limit: 0 or more.

    Raises:
        ValueError: a gradient is sparse.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-limit, limit)


def _local(gradient: Any) -> Tensor:
    """Return the elements of a gradient on this rank.

    Raises:
        ValueError: the gradient is sparse.
    """
    local: Tensor = gradient.detach()
    if is_dtensor(gradient):
        assert not any(part.is_partial() for part in gradient.placements), "a gradient is not summed over ranks yet"
        local = gradient.to_local().detach()
    if local.layout is not torch.strided:
        raise ValueError(SPARSE_CLIPPED)
    return local
