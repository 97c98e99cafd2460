"""The memory of tensors as bytes, which all backends send: gloo has no bool, 8-bit float and some integers."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes.

    Args:
        tensor: tensor of any shape, strides and dtype.

    Returns:
        bytes of shape [elements * bytes of an element], in the memory of a contiguous tensor; otherwise a copy. Numbers
        that torch has conjugated or negated lazily are a copy, too.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
