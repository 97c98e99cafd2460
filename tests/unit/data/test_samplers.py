"""Orders by a criterion are permutations, and exact for any number of ranks and after a resume."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from fabricx.data import BucketSampler, GroupSampler, make_feed
from fabricx.distributed.world import World

LENGTHS = [(7 * position) % 31 for position in range(50)]
GROUPS = [position % 6 for position in range(50)]
SAMPLERS = {
    "buckets": BucketSampler(LENGTHS, bucket=8),
    "groups": GroupSampler(GROUPS),
    "weights": WeightedRandomSampler(torch.arange(1.0, 51.0).tolist(), 50),
}


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without process groups: ranks would compare their orders by a collective."""
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value])


def trained(sampler: Any, ranks: int, position: int = 0, epoch: int = 0, began_with: int = 4) -> list[set[int]]:
    """Return the samples of each global batch, by position."""
    batches: dict[int, list[int]] = {}
    for rank in range(ranks):
        loader = DataLoader(range(50), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        feed = make_feed(loader, World(rank=rank, size=ranks), seed=5, began_with=began_with)
        for micro in feed.epoch(epoch, position=position):
            if not micro.empty:
                batches.setdefault(micro.window_end, []).extend(micro.data.tolist())
    return [set(batches[key]) for key in sorted(batches)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_global_batches_are_the_same_for_any_number_of_ranks_and_from_any_position(name: str) -> None:
    whole = trained(SAMPLERS[name], ranks=4)
    for ranks in (1, 2, 3):
        assert trained(SAMPLERS[name], ranks) == whole
    assert trained(SAMPLERS[name], ranks=3, position=16) == whole[2:]
    assert trained(SAMPLERS[name], ranks=4, epoch=1) != whole


@pytest.mark.parametrize("sampler", [SAMPLERS["buckets"], SAMPLERS["groups"]], ids=["buckets", "groups"])
def test_each_sample_is_read_once(sampler: Any) -> None:
    assert sorted(sampler) == list(range(50))
    assert len(sampler) == 50


def test_a_bucket_holds_samples_of_similar_length() -> None:
    order = list(SAMPLERS["buckets"])
    spreads = [
        max(members) - min(members) for members in ([LENGTHS[i] for i in order[a : a + 8]] for a in range(0, 48, 8))
    ]
    assert max(spreads) <= 5  # 50 lengths of 0 to 30 in buckets of 8


def test_a_group_stays_together_in_its_own_order() -> None:
    order = list(SAMPLERS["groups"])
    runs = [list(members) for _, members in itertools.groupby(order, key=lambda position: GROUPS[position])]
    assert len(runs) == 6
    assert all(members == sorted(members) for members in runs)


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket=0"):
        BucketSampler([1, 2], bucket=0)


def test_a_batch_sampler_on_ranks_that_read_all_data_is_divided_and_not_leased() -> None:
    feed = make_feed(DataLoader(range(8), 4), World(size=2), seed=1, shard=False)  # type: ignore[arg-type]
    assert [micro.loss_factor for micro in feed.epoch(0)] == [0.5, 0.5]
    with pytest.raises(ValueError, match="remove use_distributed_sampler"):
        next(feed.leased(None, None, 0))  # type: ignore[arg-type]
