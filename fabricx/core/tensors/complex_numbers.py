"""Views of complex tensors as real tensors; a conversion to a real dtype would discard the imaginary parts."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of its real and imaginary parts; return other tensors unchanged.

    Args:
        tensor: tensor of any shape and dtype.

    Returns:
        for a complex tensor of shape [...], a real tensor of shape [..., 2] in the same memory.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
