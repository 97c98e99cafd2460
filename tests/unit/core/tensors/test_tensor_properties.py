"""Functions that read only the properties of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fabricx.core.tensors.tensor_properties import PROPERTIES


class Others(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PROPERTIES:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_sizes_and_dtypes_are_properties_and_elements_are_not() -> None:
    tensor, mode = torch.ones(2, 3), Others()
    with mode:
        _ = tensor.shape, tensor.dtype, tensor.device, tensor.ndim, tensor.requires_grad, tensor.is_leaf, len(tensor)
        _ = tensor.size(0), tensor.dim(), tensor.numel(), tensor.stride(), tensor.is_contiguous(), hash(tensor)
        assert mode.names == []
        _ = tensor.detach(), tensor.sum(), tensor.data, tensor.tolist()
    assert mode.names == ["detach", "sum", "__get__", "tolist"]
    assert isinstance(tensor, Tensor)
