"""Averages of optimizer states over ranks that have stepped independently."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

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


def average_moments(world: World, optimizer: Optimizer) -> None:
    """Average the moments of an optimizer that has stepped independently on each rank.

    A rank whose optimizer has not stepped yet has no state, and receives the average of the ranks with a state. Step
    counts and other scalars of a parameter with dimensions are not averaged; a rank without them copies the values of
    the first rank with a state.

    Args:
        world: ranks that have stepped; all call this together.
        optimizer: optimizer with the same parameters on all ranks; its state is changed in place.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    joined = {
        (number, name): value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if is_moment(name, value, parameter.dim())
    }
    rest = {
        (number, name): value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if (number, name) not in joined
    }
    states = world.gather_objects(({key: (v.shape, v.dtype) for key, v in joined.items()}, rest))
    for number, name in sorted(set().union(*(rests for _, rests in states)) - rest.keys()):
        value = next(rests[number, name] for _, rests in states if (number, name) in rests)
        optimizer.state[parameters[number]][name] = value
    kinds = {key: kind for moments, _ in states for key, kind in moments.items()}
    for key in sorted(kinds):
        shape, dtype = kinds[key]
        moment = joined.get(key)
        if moment is None:
            moment = torch.zeros(shape, dtype=dtype, device=parameters[key[0]].device)
            optimizer.state[parameters[key[0]]][key[1]] = moment
        world.all_reduce(moment).div_(sum(key in moments for moments, _ in states))
