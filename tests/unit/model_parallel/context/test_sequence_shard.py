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


@pytest.mark.parametrize(("length", "piece"), [(9, 0), (7, 0), (6, 0), (6, 3)])
def test_repeats_of_the_last_position_fill_shards_and_are_not_read(length: int, piece: int) -> None:
    whole = torch.arange(2 * length).view(2, length)
    shards = [SequenceShard(length, 3, rank, "cpu", piece) for rank in range(3)]
    parts = torch.stack([shard.part(whole, 1) for shard in shards])
    for shard, part in zip(shards, parts, strict=True):
        assert (part[:, shard.filled :] == whole[:, -1:]).all()
    assert sum(shard.filled for shard in shards) == length
    assert torch.equal(shards[0].ordered(parts, 1), whole)


def test_each_rank_has_the_same_number_of_causal_attention_pairs() -> None:
    pairs = {int((SequenceShard(24, 4, rank).positions + 1).sum()) for rank in range(4)}
    assert len(pairs) == 1


def test_a_sequence_with_fewer_positions_than_pieces_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"context=2 .* into 4 pieces, and its length is 3: .* a smaller context"):
        SequenceShard(3, 2, 0)


def test_gradients_of_joined_shards_are_scaled_for_averaging() -> None:
    for length, kept in ((4, [1.0, 1, 1, 1]), (3, [1.0, 1, 1, 0])):  # a repeat has no gradient
        local = torch.arange(3 * 4.0).view(3, 4).requires_grad_()
        shard = SequenceShard(length, 1, 0)
        for join in (joined, gathered):
            join(local, World(), shard, 1).square().sum().backward()
            assert local.grad is not None
            assert torch.equal(local.grad, 2 * local.detach() * torch.tensor(kept))
            local.grad = None
