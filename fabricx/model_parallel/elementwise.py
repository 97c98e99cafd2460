"""Check that an optimizer treats each element of a parameter separately, so that a rank can step its part alone."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.rng import random_kept
from fabricx.model_parallel.step_hooks import HOOKS

_ROWS: Final = [(slice(0, 2),), (slice(2, 4),)]
_COLUMNS: Final = [(slice(None), slice(0, 3)), (slice(None), slice(3, 6))]


def check_elementwise(optimizer: Optimizer, where: str) -> None:
    """Refuse an optimizer if the update of an element depends on other elements of the parameter.

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
        whole = _stepped(optimizer, [()])
        parts = [_stepped(optimizer, division) for division in (_ROWS, _COLUMNS)]
    except Exception as error:
        raise ValueError(
            f"{where} divides parameters, but {name} fails in a test with a part of a parameter: "
            f"{type(error).__name__}: {error}. Use an optimizer of torch.optim, such as AdamW"
        ) from error
    if not all(torch.allclose(whole, part, rtol=1e-5, atol=1e-8) for part in parts):
        raise ValueError(
            f"{name} computes an update from a whole matrix, and {where} divides matrices: the update of a part would "
            "differ. Use an optimizer that treats elements separately, such as AdamW or SGD, or strategy=ddp"
        )


def _stepped(optimizer: Optimizer, division: Sequence[tuple[slice, ...]]) -> Tensor:
    """Return a matrix of shape [4, 6] after three steps, stepped in parts of some rows or columns."""
    generator = torch.Generator().manual_seed(0)
    begin, gradients = torch.randn(4, 6, generator=generator), torch.randn(3, 4, 6, generator=generator)
    group: dict[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else dict(optimizer.defaults)
    parameters = [nn.Parameter(begin[part].clone()) for part in division]
    trial = copy.copy(optimizer)
    trial.__dict__ = {**vars(optimizer), "state": defaultdict(dict)}
    trial.param_groups = [{**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": parameters}]
    if "lr" in group:  # a warm-up may begin with a rate of 0, and all updates would be equal
        trial.param_groups[0]["lr"] = torch.tensor(0.1) if isinstance(group["lr"], Tensor) else 0.1
    vars(trial).pop("step", None)  # a scheduler has wrapped it
    vars(trial).update({name: OrderedDict() for name in HOOKS})  # of the user, which may change the module's weights
    with random_kept():
        for gradient in gradients:
            for parameter, part in zip(parameters, division, strict=True):
                parameter.grad = gradient[part].clone()
            type(optimizer).step(trial)
    for parameter, part in zip(parameters, division, strict=True):
        begin[part] = parameter.detach()
    return begin
