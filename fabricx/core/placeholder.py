"""Placeholders of parameters and buffers of other stages of a pipeline."""

from __future__ import annotations

from torch import Tensor

from fabricx.distributed.dtensors import is_dtensor


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape, but no memory for its elements: the parameter is on a different stage.

    Args:
        tensor: tensor of a module; DTensors are never placeholders.

    >>> import torch
    >>> [is_placeholder(tensor) for tensor in (torch.zeros(()).expand(1), torch.zeros(1), torch.zeros(()))]
    [True, False, False]
    """
    return tensor.dim() > 0 and all(stride == 0 for stride in tensor.stride()) and not is_dtensor(tensor)
