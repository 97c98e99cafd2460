"""Shards of whole tensors: joined again they are the whole, and fsdp's shards of them have their rows."""

from __future__ import annotations

import pytest
import torch

from fabricx.model_parallel.placement import Placement, share

CASES = [
    ((12, 5), 0, (4, 4, 4), 2),
    ((5, 16), 1, (8, 4, 4), 4),
    ((67, 3), 0, (67,), 4),
    ((3, 2), 0, (3,), 4),
    ((8,), 0, (4, 4), 2),
]


@pytest.mark.parametrize(("shape", "dim", "parts", "ranks"), CASES)
def test_the_shards_of_all_ranks_make_up_the_whole_tensor(shape, dim, parts, ranks):
    placement, whole = Placement(shape, dim, parts, ranks), torch.randn(shape)
    shards = [placement.shard(whole, rank) for rank in range(ranks)]
    assert [tuple(shard.shape) for shard in shards] == [placement.local_shape(rank) for rank in range(ranks)]
    assert torch.equal(placement.join(shards), whole)


def test_a_rank_has_its_shard_of_each_part():
    placement = Placement((12,), 0, (8, 2, 2), 2)
    assert placement.shard(torch.arange(12), 1).tolist() == [4, 5, 6, 7, 9, 11]


@pytest.mark.parametrize(("shape", "dim", "parts", "ranks"), CASES)
@pytest.mark.parametrize("data", [1, 2, 3])
def test_regions_of_shards_that_fsdp_shards_again_cover_the_whole_once(shape, dim, parts, ranks, data):
    placement, whole = Placement(shape, dim, parts, ranks), torch.randn(shape)
    again, count = torch.full_like(whole, torch.nan), torch.zeros_like(whole)
    for rank in range(ranks):
        shard = placement.shard(whole, rank)
        for data_rank in range(data):
            begin, end = share(len(shard), data_rank, data)
            for local, region in placement.slices(rank, begin, end):
                again[region] = shard[begin:end][local]
                count[region] += 1
    assert torch.equal(again, whole)
    assert (count == 1).all()
