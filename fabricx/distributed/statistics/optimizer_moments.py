"""Averages of optimizer states over ranks that have stepped independently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.distributed.sharding.dtensors import own_part
from fabricx.distributed.world import World


def is_moment(name: str, value: object, parameter_dims: int) -> bool:
    """Return whether an entry of an optimizer's state is averaged over ranks: a moment, and no count of steps.

    Args:
        name: key of the entry.
        value: value of the entry.
        parameter_dims: number of dimensions of the parameter; the moments of a scalar parameter are scalars, too.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 0 or (parameter_dims == 0 and name != "step")


def furthest(states: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the state of a parameter that has made the most steps; the first of several.

    Args:
        states: state of the parameter on each rank, in which "step" may be missing.
    """
    steps = [float(state.get("step", 0)) for state in states]
    return steps.index(max(steps))


def average_moments(world: World, optimizer: Optimizer) -> None:
    """Average the moments of an optimizer that has stepped independently on each rank.

    A rank whose optimizer has not stepped yet has no state, and receives the average of the ranks with a state. Step
    counts and other scalars of a parameter with dimensions are not averaged: all ranks continue with the values of the
    rank that has made the most steps of the parameter, since a checkpoint has a single value.

    Args:
        world: ranks that have stepped; all call this together.
        optimizer: optimizer with the same parameters on all ranks; its state is changed in place.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fused = [group.get("capturable") or group.get("fused") for group in optimizer.param_groups for _ in group["params"]]
    on_device = {number: parameter.device for number, parameter in enumerate(parameters) if fused[number]}
    joined: dict[tuple[int, str], Tensor] = {}
    rest: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if is_moment(name, value, parameter.dim()):
                joined[number, name] = value
            else:
                rest.setdefault(number, {})[name] = value
    sent = {number: {name: _on_cpu(value) for name, value in values.items()} for number, values in rest.items()}
    states = world.gather_objects(({key: (v.shape, v.dtype) for key, v in joined.items()}, sent))
    for number in sorted(set().union(*(rests for _, rests in states))):
        by_rank = [rests.get(number, {}) for _, rests in states]
        if (holder := furthest(by_rank)) != world.rank:
            _update(optimizer.state[parameters[number]], by_rank[holder], on_device.get(number))
    kinds = {key: kind for moments, _ in states for key, kind in moments.items()}
    for key in sorted(kinds):
        shape, dtype = kinds[key]
        moment = joined.get(key)
        if moment is None:
            moment = _zeros(parameters[key[0]], shape, dtype)
            optimizer.state[parameters[key[0]]][key[1]] = moment
        world.all_reduce(own_part(moment)).div_(sum(key in moments for moments, _ in states))


def _zeros(parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # a shard, if the parameter is one
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value  # this device may be invisible to other ranks


def _update(state: dict[str, Any], values: Mapping[str, Any], device: torch.device | None) -> None:
    """Set entries of a parameter's state; new tensors are placed on the device, or on the CPU without a device."""
    for name, value in values.items():
        own = state.get(name)
        if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            state[name] = value.to(device) if device is not None and isinstance(value, Tensor) else value
