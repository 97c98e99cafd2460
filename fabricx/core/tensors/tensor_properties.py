"""Functions of torch that read no elements of a tensor."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

SIZES: Final[set[Any]] = {
    Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape",)),
}  # fmt: skip
PROPERTIES: Final[set[Any]] = {
    *SIZES, Tensor.dim, Tensor.ndimension, Tensor.is_contiguous, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.is_complex, Tensor.get_device, Tensor.element_size, Tensor.__hash__, torch.is_tensor, torch.is_complex,
    *(getattr(Tensor, name).__get__ for name in (
        "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_leaf", "is_nested", "is_sparse",
        "is_quantized", "is_meta", "_version", "grad_fn",
    )),
}  # fmt: skip
