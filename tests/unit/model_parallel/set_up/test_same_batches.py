"""Ranks that compute a batch together have read the same batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.core.module_state.rng import RandomState
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.model_parallel.set_up.same_batches import SameBatches


def digests(monkeypatch: pytest.MonkeyPatch, batch: Any) -> list[int]:
    """Return the two digests of a batch that a rank contributes."""
    values: list[int] = []

    def all_reduce(world: World, tensor: Tensor, op: str) -> Tensor:
        assert op == "max"
        values.extend(tensor.tolist()[:2])
        return tensor

    monkeypatch.setattr(World, "all_reduce", all_reduce)
    SameBatches(World(size=2)).check(batch)
    return values


def test_the_comparison_includes_values_shapes_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    four = torch.arange(4)
    batches = [four, four + 1, four.view(2, 2), four.flip(0), {"x": torch.zeros(4)}]
    seen = [tuple(digests(monkeypatch, batch)) for batch in batches]
    assert len(set(seen)) == len(batches)
    assert all(low == -high for high, low in seen)
    assert digests(monkeypatch, torch.arange(4)) == list(seen[0])


def test_a_different_batch_on_a_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "all_reduce", lambda world, tensor, op: tensor + torch.tensor([1, 0, 0, 0]))
    with pytest.raises(RanksDisagree, match="have read different samples"):
        SameBatches(World(size=2)).check([torch.zeros(2)])


def test_ranks_take_over_the_random_numbers_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, differs = RandomState().packed(), 0  # of the first rank
    monkeypatch.setattr(World, "all_reduce", lambda world, tensor, op: tensor + torch.tensor([0, 0, differs, 0]))
    monkeypatch.setattr(World, "broadcast_object", lambda world, value: packed)
    expected = torch.rand(1)
    SameBatches(World(size=2)).check([torch.zeros(2)])
    assert torch.rand(1) != expected
    differs = 1
    SameBatches(World(size=2)).check([torch.zeros(2)])
    assert torch.rand(1) == expected
