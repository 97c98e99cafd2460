"""Selection of the feed for a user's data."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from fabricx.data import CombinedLoader, make_feed
from fabricx.data.iterable import ListFeed
from fabricx.data.map_style import OrderedFeed
from fabricx.distributed.world import World

DATA: Any = range(20)


class Batches(BatchSampler):
    """A custom class."""


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_distributed_sampler_has_the_rank_of_its_process(wrapped: bool) -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    kind = {"batch_sampler": Batches(sampler, 5, False)} if wrapped else {"batch_size": 5, "sampler": sampler}
    loader = DataLoader(DATA, **kind)  # type: ignore[arg-type]
    make_feed(loader, World(rank=1, size=2), seed=5)
    for world in (World(rank=0, size=2), World(rank=1, size=3), World()):
        with pytest.raises(ValueError, match=f"not that of rank {world.rank} of {world.size}: remove the sampler"):
            make_feed(loader, world, seed=5)


class CustomLoader(DataLoader):
    """Overrides iteration, with a position that it saves."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Filtered(DataLoader):
    """Overrides the batches."""

    def __iter__(self) -> Any:
        return map(str, super().__iter__())


class Prepared(DataLoader):
    """Overrides batch creation, as loaders of torch_geometric do."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Endless(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(range(20))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Filtered(DATA, 4), "Filtered changes how a DataLoader is read"),
        (Prepared(DATA, 4), "Prepared changes how a DataLoader is read"),
        (DataLoader(DATA, 4, sampler=Endless()), "Endless has no length"),
        (DataLoader(DATA, batch_sampler=map(list, [[1], [2]])), "map has no length"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_loaders_that_each_rank_would_read_completely_are_refused(source: Any, reason: str, joined: bool) -> None:
    loader = CombinedLoader({"a": source}) if joined else source
    with pytest.raises(ValueError, match=f"{reason}.* over the 2 ranks.*use_distributed_sampler=False"):
        make_feed(loader, World(rank=1, size=2), seed=5)
    assert isinstance(make_feed(loader, World(), seed=5), ListFeed)
    assert isinstance(make_feed(loader, World(rank=1, size=2), seed=5, shard=False), ListFeed)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(20))


@pytest.mark.parametrize(
    ("source", "ordered"),
    [
        (DataLoader(DATA, 4, shuffle=True), True),
        (DataLoader(DATA, batch_sampler=Batches(DATA, 4, False)), True),
        (DataLoader(Stream(), 4), False),
        (CustomLoader(DATA, 4), False),
        ([[0, 1], [2]], False),
    ],
    ids=["map-style", "own batches", "stream", "own loader", "list"],
)
def test_a_map_style_loader_is_read_in_the_global_order_and_any_other_source_unchanged(
    source: Any, ordered: bool
) -> None:
    assert type(make_feed(source, World(), seed=5)) is (OrderedFeed if ordered else ListFeed)
    if not ordered:
        with pytest.raises(ValueError, match=f"needs a map-style DataLoader.* not {type(source).__name__}"):
            make_feed(source, World(), seed=5, parts=12)


def test_each_rank_reads_all_data_in_its_own_order_if_the_data_are_not_divided() -> None:
    loader = DataLoader(DATA, 20, shuffle=True)
    orders = []
    for rank in range(2):
        feed = make_feed(loader, World(rank=rank, size=2), seed=5, shard=False)
        [batch] = [micro.data.tolist() for micro in feed.epoch(0)]
        orders.append(batch)
    assert sorted(orders[0]) == sorted(orders[1]) == list(DATA)
    assert orders[0] != orders[1]
