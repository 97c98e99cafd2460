"""Functions of a rank's shard: a dim of one element, of which a single rank has all, is not repeated on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.model_parallel.tensor.local_rules import local_result
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (torch.add, lambda one, several: (one, torch.ones(2, 4))),
        (torch.add, lambda one, several: (several, one)),
        (Tensor.mul_, lambda one, several: (several, one)),
        (Tensor.__setitem__, lambda one, several: (several, ..., one)),
        (torch.einsum, lambda one, several: ("bt,bt->bt", one, several)),
    ],
)
def test_a_dim_of_one_element_is_not_broadcast_on_each_rank(
    rank: int, function: Any, arguments: Callable[..., Any]
) -> None:
    one = ShardedTensor(torch.ones(2, 1 - rank), 1, (2, 1))  # a sequence of one position
    several = ShardedTensor(torch.ones(2, 2), 1, (2, 4))
    activations = Activations(World(rank=rank, size=2))
    assert local_result(activations, function, arguments(one, several), {}) is NotImplemented
