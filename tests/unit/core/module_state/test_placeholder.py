"""Placeholders of tensors of other stages."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.model_parallel.pipeline import placeholders


def test_released_tensors_are_placeholders_and_others_are_not() -> None:
    module = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    names = [name for name, tensor in placeholders.tensors_by_name(module).items() if tensor.dim()]
    assert not any(map(is_placeholder, module.parameters()))
    placeholders.release(module, names)
    assert all(is_placeholder(tensor) for tensor in placeholders.tensors_by_name(module).values() if tensor.dim())
    assert not is_placeholder(torch.zeros(1))
