"""Functions on the output of a fused projection, whose parts are adjacent on each of two ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.model_parallel.tensor.fused_outputs import fused_output
from fabricx.model_parallel.tensor.sharded_activations import Activations

PARTS = (4, 4, 4)


def test_a_view_keeps_the_parts_unless_it_joins_their_dim_with_another() -> None:
    activations = Activations(World(size=2))
    weight = activations.sharded(torch.arange(18.0).view(6, 3), 0, PARTS)  # rows of the first rank
    assert fused_output(activations, Tensor.view, (weight, -1), {}) is NotImplemented  # gathered: rows have an order
    in_heads = fused_output(activations, Tensor.view, (weight, 3, 4, 3), {})
    assert in_heads.shape == (3, 4, 3)
    assert torch.equal(in_heads.local, weight.local.view(3, 2, 3))
