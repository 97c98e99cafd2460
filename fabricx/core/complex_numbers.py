"""Complex tensors as real tensors: a conversion to a real dtype would drop the imaginary parts with a mere warning."""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor of real numbers with the same memory: both parts of complex numbers, or the tensor itself.

    Args:
        tensor: of any dtype.

    Returns:
        Tensor of shape [..., 2] of a complex tensor.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
