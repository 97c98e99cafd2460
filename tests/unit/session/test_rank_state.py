from __future__ import annotations

import torch
from torch import nn

from fabricx.session.rank_state import BufferCopies, load_buffers

CHANGES = {
    "complex": torch.tensor([1 + 2j, -3j]),
    "large": torch.tensor([2**60 + 1]),  # more than a 64-bit floating point number holds
    "flag": torch.tensor(True),
    "small": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
}


def with_buffers() -> nn.Module:
    module = nn.Module()
    for name, value in CHANGES.items():
        module.register_buffer(name, torch.zeros_like(value))
    return module


def test_buffers_of_each_dtype_are_taken_up_to_the_bit() -> None:
    trained, replacement = with_buffers(), with_buffers()
    copies = BufferCopies(trained)
    for name, value in CHANGES.items():
        trained.get_buffer(name).copy_(value)
    load_buffers(replacement, copies.packed())
    assert all(torch.equal(replacement.get_buffer(name), value) for name, value in CHANGES.items())
