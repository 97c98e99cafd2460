"""Weights that workers keep in a common vector have the same dtype."""

from __future__ import annotations

import pytest
import torch

from fabricx.parameter_server.worker.shared_memory_weights import check_shareable


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_of_a_single_dtype_can_be_shared(dtype: torch.dtype) -> None:
    check_shareable([torch.zeros(2, dtype=dtype), torch.zeros(3, dtype=dtype)])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.bfloat16)])
def test_unsupported_parameters_are_refused_before_memory_is_shared(dtypes: tuple[torch.dtype, ...]) -> None:
    with pytest.raises(ValueError, match="all of one dtype: set servers=1"):
        check_shareable([torch.zeros(2, dtype=dtype) for dtype in dtypes])
