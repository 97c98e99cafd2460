"""Placeholders of parameters and buffers of other stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fabricx.distributed.sharding.dtensors import is_dtensor


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape, but no memory for its elements: the parameter is on a different stage.

    Args:
        tensor: tensor of a module; DTensors are never placeholders.

    >>> import torch
    >>> [is_placeholder(tensor) for tensor in (torch.zeros(()).expand(1), torch.zeros(1), torch.zeros(()))]
    [True, False, False]
    """
    return tensor.dim() > 0 and all(stride == 0 for stride in tensor.stride()) and not is_dtensor(tensor)


def load_present(module: nn.Module, weights: Mapping[str, Any], absent: Collection[str]) -> None:
    """Load the parameters and buffers that this rank holds.

    Args:
        module: the user's module.
        weights: by name, without those of other stages.
        absent: names of the parameters and buffers of other stages.

    Raises:
        RuntimeError: names are missing or unknown; not if the module has `strict_loading=False`.
    """
    loaded = module.load_state_dict(weights, strict=False)
    missing = [name for name in loaded.missing_keys if name not in absent]
    differences = {"missing": missing, "unexpected": loaded.unexpected_keys}
    if any(differences.values()) and getattr(module, "strict_loading", None) is not False:
        lists = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in differences.items() if names)
        raise RuntimeError(f"Error(s) in loading state_dict: the names differ from those of the module. {lists}")
