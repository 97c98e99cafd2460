"""Tensors of a module by their names in checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def stored_tensors(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of a module with its own parameters and buffers, not detached tensors.

    Args:
        module: of the user; its `state_dict` may lack the parameter `keep_vars`.
    """
    parameters = inspect.signature(module.state_dict).parameters.values()
    if any(parameter.name == "keep_vars" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return module.state_dict(keep_vars=True)
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return {name: tensors.get(name, value) for name, value in module.state_dict().items()}
