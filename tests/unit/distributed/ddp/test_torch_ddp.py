"""Buffers that torch's DDP can broadcast, and unused parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.distributed.ddp.torch_ddp import StepModule, check_dtypes


def test_buffers_that_torch_cannot_broadcast_are_refused() -> None:
    module = nn.BatchNorm1d(2)
    check_dtypes(module)
    module.register_buffer("counts", torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"cannot broadcast counts of torch\.int16: use a wider dtype"):
        check_dtypes(module)


def test_ddp_finds_an_unused_parameter_where_a_step_has_several_backwards() -> None:
    module = nn.Linear(2, 1, dtype=torch.float64)
    names = [name for name, _ in StepModule(module).named_parameters()]
    assert names == ["module.weight", "module.bias"]
    assert StepModule(module, several_backwards=True).unused.dtype is torch.float64  # no separate bucket
    assert not hasattr(StepModule(module.requires_grad_(False), several_backwards=True), "unused")
