"""Shards of a sequence; gathers between ranks are in the process tests."""

from __future__ import annotations

import pytest
import torch

from fabricx.distributed.world import World
from fabricx.model_parallel.context.sequence_shard import SequenceShard, gathered, joined


def test_shards_are_the_sequence_and_its_order_is_restored() -> None:
    whole = torch.arange(2 * 12).view(2, 12)
    shards = [SequenceShard(12, 3, rank) for rank in range(3)]
    parts = torch.stack([shard.part(whole, 1) for shard in shards])
    assert parts[0, 0].tolist() == [0, 1, 10, 11]
    assert torch.equal(shards[1].ordered(parts, 1), whole)
    assert shards[1].pieces == ((2, 4), (8, 10))


def test_each_rank_has_the_same_number_of_causal_attention_pairs() -> None:
    pairs = {int((SequenceShard(24, 4, rank).positions + 1).sum()) for rank in range(4)}
    assert len(pairs) == 1


def test_a_sequence_that_does_not_fit_is_an_error_with_the_next_length_that_fits() -> None:
    with pytest.raises(ValueError, match=r"context=2 .* its length is 10: .* multiple of 4, such as 12"):
        SequenceShard(10, 2, 0)


def test_gradients_of_joined_shards_are_scaled_for_averaging() -> None:
    local = torch.arange(3 * 4.0).view(3, 4).requires_grad_()
    shard = SequenceShard(4, 1, 0)
    for join, factor in ((joined, 1.0), (gathered, 1.0)):
        join(local, World(), shard, 1).square().sum().backward()
        assert local.grad is not None
        assert torch.equal(local.grad, 2 * local.detach() * factor)
        local.grad = None
