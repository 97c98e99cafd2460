"""Bytes of tensors: of each dtype, in the memory of contiguous tensors."""

from __future__ import annotations

import pytest
import torch

from fabricx.distributed.messages.tensor_bytes import as_bytes


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_contiguous_tensor_shares_its_memory(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(3, 2).to(dtype), torch.ones(()).to(dtype), torch.ones(0).to(dtype)):
        content = as_bytes(tensor)
        assert content.shape == (tensor.numel() * tensor.element_size(),)
        content.zero_()
        assert not tensor.float().any()


def test_other_tensors_are_copied_in_the_order_of_their_elements() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert as_bytes(tensor.T).view(torch.int16).tolist() == [0, 3, 1, 4, 2, 5]
    assert as_bytes(torch.tensor([1.0 + 2.0j]).conj()).view(torch.complex64).tolist() == [1.0 - 2.0j]
    assert as_bytes(torch.tensor([2.0j]).conj().imag).view(torch.float32).tolist() == [-2.0]
