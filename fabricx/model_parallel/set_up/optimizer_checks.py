"""Checks that ranks can step parts of the parameters: elements, parameters, or shards of parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.module_state.rng import random_kept
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.model_parallel.step_hooks import HOOKS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from fabricx.distributed.world import World

_ROWS: Final = [(slice(0, 2),), (slice(2, 4),)]
_COLUMNS: Final = [(slice(None), slice(0, 3)), (slice(None), slice(3, 6))]
_MATRICES: Final = [(slice(0, 1),), (slice(1, 4),)]  # of different sizes, as two parameters
_SCALES: Final = (1.0, 30.0, 0.1, *[1.0] * 7)  # of the gradients of a trial; then estimates of the rate may grow


def check_elementwise(optimizer: Optimizer, where: str) -> None:
    """Refuse an optimizer if the update of an element depends on other elements, of the same or of other parameters.

    Args:
        optimizer: the user's optimizer; unchanged.
        where: the option that divides parameters, for the message.

    Raises:
        ValueError: the optimizer needs whole parameters, or the test fails.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"LBFGS needs all gradients as a single vector, and {where} divides them: use AdamW or SGD")
    step = vars(optimizer).get("step", type(optimizer).step)
    if step is not type(optimizer).step and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        raise ValueError(
            f"the step of {name} is replaced by another function, and {where} divides parameters: override "
            "optimizer_step of the module, whose code sees whole weights, or use strategy=ddp"
        )
    try:
        whole = _stepped(optimizer, [[()]])
        parts = [_stepped(optimizer, [[part] for part in division]) for division in (_ROWS, _COLUMNS)]
    except Exception as error:
        raise ValueError(
            f"{where} divides parameters, but {name} fails in a test with a part of a parameter: "
            f"{type(error).__name__}: {error}. Use an optimizer of torch.optim, such as AdamW"
        ) from error
    if not all(_close(whole, part) for part in parts):
        raise ValueError(
            f"{name} computes an update from a whole matrix or from several parameters, and {where} divides matrices: "
            "the update of a part would differ. Use an optimizer that treats elements separately, such as AdamW or "
            "SGD, or strategy=ddp"
        )


def check_separate(optimizer: Optimizer, where: str) -> None:
    """Refuse an optimizer if the update of a parameter depends on other parameters, which are on other ranks.

    An optimizer that can't be tried, as it needs a closure, for example, is not refused.

    Args:
        optimizer: the user's optimizer; unchanged.
        where: the option that distributes the parameters, for the message.

    Raises:
        ValueError: the updates differ.
    """
    if is_coupled(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} computes the update of a parameter from several parameters, such as a norm of "
            f"all gradients, and with {where} these are on different ranks: use an optimizer that treats parameters "
            "separately, such as AdamW or SGD, or strategy=ddp. For a limit of the norm set gradient_clip_val"
        )


def is_coupled(optimizer: Optimizer) -> bool:
    """Return whether a trial shows that the update of a parameter depends on other parameters.

    Args:
        optimizer: the user's optimizer; unchanged.
    """
    if _is_of_torch(optimizer):
        return False
    try:
        return not _close(_stepped(optimizer, [_MATRICES]), _stepped(optimizer, [[part] for part in _MATRICES]))
    except Exception:  # it can't be tried without its parameters, or without a closure
        return False


def check_with_shards(optimizer: Optimizer, like: DTensor, ranks: World) -> None:
    """Refuse a user's optimizer whose update differs if the parameters are DTensors. Collective.

    The sum of a DTensor as a number in Python (`float(gradient.sum())`), for example, is that of the shard. An
    optimizer that can't be tried, as it needs a closure, for example, is not refused: its first step explains an error.

    Args:
        optimizer: the user's optimizer; unchanged.
        like: parameter with the mesh of the run, sharded along dimension 0.
        ranks: the ranks of the mesh.

    Raises:
        ValueError: the updates differ, on any rank.
    """
    if _is_of_torch(optimizer):
        return
    from torch.distributed.tensor import DTensor

    def sharded(tensor: Tensor) -> Tensor:
        replicated = DTensor.from_local(tensor.to(like.device), like.device_mesh, run_check=False)
        return replicated.redistribute(placements=like.placements).detach()

    half = 2 * ranks.size  # rows of each parameter: no shard is empty, so that all ranks run the same operations
    matrices = [[(slice(0, half),), (slice(half, 2 * half),)]]
    try:
        expected = _stepped(optimizer, matrices, rows=2 * half)
        differs = not _close(expected, _stepped(optimizer, matrices, sharded, rows=2 * half))
    except Exception:
        differs = False
    if any(ranks.gather_objects(differs)):
        raise ValueError(
            f"{type(optimizer).__name__} makes another update with the sharded parameters of fsdp. Compute norms and "
            "sums by functions of torch whose results are DTensors, as in "
            "torch.stack([p.grad.norm() for p in parameters]).norm(), not as numbers in Python; or use AdamW or SGD, "
            "or strategy=ddp"
        )


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _close(expected: Tensor, found: Tensor) -> bool:
    return torch.allclose(expected, found, rtol=1e-5, atol=1e-8)


def _stepped(
    optimizer: Optimizer, groups: Sequence[Sequence[tuple[slice, ...]]],
    placed: Callable[[Tensor], Tensor] = torch.clone, *, rows: int = 4,
) -> Tensor:  # fmt: skip
    """Return a matrix of shape [rows, 6] after several steps, in which separate optimizers step groups of its parts.

    Args:
        optimizer: the user's optimizer; copies of it step.
        groups: parts of the matrix that are the parameters of each copy.
        placed: returns a parameter or gradient for a part of the matrix.
        rows: rows of the matrix.
    """
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(rows, 6, generator=generator)
    noise = torch.randn(len(_SCALES), rows, 6, generator=generator)
    gradients = (torch.randn(rows, 6, generator=generator) + 0.3 * noise) * torch.tensor(_SCALES).view(-1, 1, 1)
    result = begin.clone()
    for parts in groups:
        parameters = [nn.Parameter(placed(begin[part])) for part in parts]
        trial = _copy(optimizer, parameters)
        with random_kept():
            for gradient in gradients:
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = placed(gradient[part])
                type(optimizer).step(trial)
        for parameter, part in zip(parameters, parts, strict=True):
            stepped = parameter.detach()
            result[part] = stepped.full_tensor() if is_dtensor(stepped) else stepped
    return result


def _copy(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer for other parameters, without state, hooks and schedule."""
    group: dict[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else dict(optimizer.defaults)
    trial = copy.copy(optimizer)
    trial.__dict__ = {name: _own(value) for name, value in vars(optimizer).items()}
    trial.state = defaultdict(dict)
    trial.param_groups = [{**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": parameters}]
    if "lr" in group:  # a warm-up may begin with a rate of 0, and all updates would be equal
        trial.param_groups[0]["lr"] = torch.tensor(1.0) if isinstance(group["lr"], Tensor) else 1.0
    vars(trial).pop("step", None)  # a scheduler has wrapped it
    vars(trial).update({name: OrderedDict() for name in HOOKS})  # of the user, which may change the module's weights
    return trial


def _own(value: Any) -> Any:
    """Return a copy of an attribute that a step may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
