"""What torch's DDP can broadcast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.distributed.torch_ddp import check_dtypes


def test_buffers_that_torch_cannot_broadcast_are_refused() -> None:
    module = nn.BatchNorm1d(2)
    check_dtypes(module)
    module.register_buffer("counts", torch.zeros(2, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"cannot broadcast counts of torch\.int16: use a wider dtype"):
        check_dtypes(module)
