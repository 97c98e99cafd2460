"""Shapes of the inputs and outputs of submodules, from a forward of an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fabricx.core.module_state.rng import random_kept

UNKNOWN = "?"  # of a submodule that the forward does not call, and of an object without a shape


def forward_sizes(module: nn.Module, example: Any, forward: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the shapes of the inputs and outputs of the first call of each submodule, by its name.

    The forward runs in evaluation mode, without gradients, and changes no random state.

    Args:
        module: any module.
        example: input of the forward; a tuple or a list for several, a mapping for keywords.
        forward: the forward of the module.
    """
    sizes: dict[str, tuple[Any, Any]] = {}
    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule)]
    hooks = [part.register_forward_hook(partial(_keep, sizes, name), with_kwargs=True) for name, part in parts]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), random_kept():
            if isinstance(example, Mapping):
                forward(**example)
            elif isinstance(example, (list, tuple)):
                forward(*example)
            else:
                forward(example)
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in modes:
            part.training = mode
    return sizes


def _keep(
    sizes: dict[str, tuple[Any, Any]], name: str, part: nn.Module, positional: tuple[Any, ...], named: dict[str, Any],
    output: Any,
) -> None:  # fmt: skip
    inputs = (*positional, *named.values())
    sizes.setdefault(name, (shape(inputs[0] if len(inputs) == 1 else inputs), shape(output)))


def shape(value: Any) -> Any:
    """Return the shape of a tensor as a list; of a list or a tuple, the shapes of its elements; "?" without any.

    Args:
        value: any object.

    >>> shape((torch.zeros(2, 3), [torch.zeros(1), "text"])), shape([]), shape(torch.tensor(0))
    ([[2, 3], [[1], '?']], '?', '?')
    """
    if hasattr(value, "shape"):
        return list(value.shape) or UNKNOWN
    return ([shape(element) for element in value] if isinstance(value, (list, tuple)) else []) or UNKNOWN
