"""The order of a user's samplers and batch samplers is the order of training, or they are refused."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from fabricx.core.strategy_support.dealer import Dealer
from fabricx.data import CombinedLoader, make_feed
from fabricx.data.map_style import OrderedFeed
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.parameter_server.wire.messages import LeaseReply

DATA: Any = range(20)


def read(loader: Any, rank: int = 0, ranks: int = 1, epoch: int = 0, **options: Any) -> list[list[int]]:
    feed = make_feed(loader, World(rank=rank, size=ranks), seed=5, **options)
    order = feed._order(epoch) if isinstance(feed, OrderedFeed) else None
    if ranks > 1 and order is not None:  # no process group: only the order is tested
        return [list(order)]
    return [micro.data.tolist() for micro in feed.epoch(epoch) if not micro.empty]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_of_torch_is_read_like_a_loader_with_batch_size(drop_last: bool) -> None:
    odd = range(1, 20, 2)
    custom = DataLoader(DATA, batch_sampler=BatchSampler(odd, 4, drop_last))
    usual = DataLoader(DATA, batch_size=4, sampler=odd, drop_last=drop_last)
    assert read(custom) == read(usual) == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]][: 2 if drop_last else 3]


class Batches(BatchSampler):
    """A custom class."""


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": BatchSampler(SequentialSampler(DATA), 4, False)},
        {"batch_sampler": Batches(SequentialSampler(DATA), 4, False)},
        {"batch_size": 4, "shuffle": True},
    ],
    ids=["torch", "own", "shuffle"],
)
def test_a_fixed_order_is_the_order_of_the_data_for_any_batch_size(options: dict[str, Any]) -> None:
    loader = DataLoader(DATA, **options)
    for epoch in (0, 3):
        assert read(loader, epoch=epoch, limit=2, fixed=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_run_that_continues_with_other_batches_of_a_batch_sampler_is_a_warning() -> None:
    feeds = [make_feed(DataLoader(DATA, batch_sampler=Batches(DATA, size, False)), World(), seed=5) for size in (4, 2)]
    next(feeds[0].epoch(0))
    feeds[1].order_before = feeds[0].order
    with pytest.warns(UserWarning, match="trained twice.* or of several loaders, must be those of before"):
        next(feeds[1].epoch(0, position=2))


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_feed_that_is_replaced_within_an_epoch_is_freed_with_its_loader_processes() -> None:
    """Regression: after a recovery, processes of persistent_workers=True lived until the next garbage collection."""
    with without_collection():
        feed = OrderedFeed(DataLoader(range(8), 2), World(), 0, float("inf"))  # type: ignore[arg-type]
        loader = weakref.ref(feed._loader)
        batches = feed.epoch(0)
        next(batches)
        del feed, batches
        assert loader() is None


def no_odd_numbers(rows: list[int]) -> torch.Tensor:
    return torch.tensor([row for row in rows if row % 2 == 0])


def test_a_collate_function_that_drops_samples_is_a_warning_once() -> None:
    feed = make_feed(DataLoader(DATA, 4, collate_fn=no_odd_numbers), World(), seed=5)
    with pytest.warns(UserWarning, match=r"a batch of 2 from 4 samples.* define batch_weight in the module") as warned:
        assert len([micro.data for micro in feed.epoch(0)]) == 5
    assert len(warned) == 1
    weighted = make_feed(DataLoader(DATA, 4, collate_fn=no_odd_numbers), World(), seed=5, weighted=True)
    assert len([micro.data for micro in weighted.epoch(0)]) == 5


@pytest.mark.parametrize(
    "collate",
    [torch.tensor, lambda rows: [torch.tensor(rows), torch.zeros(3)], lambda rows: torch.zeros(9, len(rows)), str],
    ids=["all", "of the batch and of others", "time first", "no tensors"],
)
def test_collate_functions_that_keep_all_samples_are_no_warning(collate: Any) -> None:
    feed = make_feed(DataLoader(DATA, 4, collate_fn=collate), World(), seed=5)
    assert len([micro.data for micro in feed.epoch(0)]) == 5
    both = CombinedLoader({"a": DataLoader(DATA, 4, collate_fn=collate), "b": DataLoader(DATA, 4)})
    assert len([micro.data for micro in make_feed(both, World(), seed=5).epoch(0)]) == 5


class Draws(Sampler[int]):
    """Shuffles with a global generator other than torch's."""

    def __init__(self, shuffle: Any) -> None:
        self._shuffle = shuffle

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Any:
        order = list(DATA)
        self._shuffle(order)
        return iter(order)


@pytest.mark.parametrize("shuffle", [random.shuffle, np.random.shuffle], ids=["python", "numpy"])
def test_a_sampler_with_another_source_of_random_numbers_has_the_same_order_on_all_ranks(shuffle: Any) -> None:
    orders = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        before = random.getstate()
        orders.append(read(DataLoader(DATA, sampler=Draws(shuffle)), rank, 2))
        assert random.getstate() == before  # the run's next draws are not affected
    assert orders[0] == orders[1] != read(DataLoader(DATA, sampler=Draws(shuffle)), 0, 2, epoch=1)


def test_samplers_that_differ_between_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(DATA, batch_size=2, sampler=range(0, 20, 2))
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value, "another"])
    with pytest.raises(RanksDisagree, match=r"a different order of the data.*use_distributed_sampler=False"):
        next(make_feed(loader, World(rank=0, size=2), seed=5).epoch(0))
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value, value])
    assert next(make_feed(loader, World(rank=1, size=2), seed=5).epoch(0)).data.tolist() == [4, 6]


def test_ranks_that_meet_without_a_lease_are_within_a_batch() -> None:
    counts, opened = iter([0, 2, 0, 1]), []  # leases that are granted in each section

    class Grants(Dealer):
        planned = 1

        def open(self, leases: int, data: Any = None) -> None:
            self.count, self.next = next(counts), 0
            opened.append(data)

        def ask(self, *, wait: bool) -> Any:
            lease = self.next if self.next < self.count else None
            self.next += 1
            return LeaseReply(lease, over=lease is None, count=self.count)

    feed = make_feed(DataLoader(range(12), 4), World(rank=0, size=1), seed=5)
    micros = list(feed.leased(Grants(), lambda done, left: 9, 0))
    meetings = [(micro.done, micro.incomplete, micro.last) for micro in micros if micro.synchronises]
    assert meetings == [(0, True, False), (2, False, False), (2, True, False), (3, False, True)]
    assert [(micro.begin, micro.end) for micro in micros if not micro.synchronises] == [(0, 4), (4, 8), (8, 12)]
    assert opened == [(0, position, 12) for position in (0, 0, 8, 8)]


class Lengths:
    """A batch sampler whose number of batches differs from its length."""

    def __init__(self, *batches: list[int], length: int = 2) -> None:
        self.batches, self.length, self.drawn = batches, length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        self.drawn += 1
        return iter(self.batches)


def test_a_batch_sampler_with_an_empty_batch_is_refused() -> None:
    feed = make_feed(DataLoader(DATA, batch_sampler=Lengths([0], [])), World(), seed=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Lengths yields an empty list of samples: a batch sampler has to leave out"):
        next(feed.epoch(0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_part_of_a_global_batch_is_a_single_batch_of_a_batch_sampler(ranks: int) -> None:
    """A window has 6 batches; divided into 2 parts, as under deterministic="elastic", 4 of them were not read."""
    rows = []
    for rank in range(ranks):
        loader: Any = DataLoader(DATA, batch_sampler=Batches(SequentialSampler(DATA), 2, False))
        feed: Any = make_feed(loader, World(rank=rank), seed=5, began_with=2, parts=2)
        feed._world = World(rank=rank, size=ranks)
        feed._check_order = lambda order: None
        rows += [micro.data.tolist() for micro in feed.epoch(0, accumulate=3) if not micro.empty]
    assert sorted(rows) == [[2 * n, 2 * n + 1] for n in range(10)]


def test_batches_beyond_the_length_of_a_sampler_are_a_warning() -> None:
    feed = make_feed(DataLoader(DATA, batch_sampler=Lengths([0], [1], [2])), World(), seed=5)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Lengths yields 3 items, and its length is 2: the items beyond"):
        assert [micro.data.tolist() for micro in feed.epoch(0)] == [[0], [1]]


def test_the_state_of_a_sampler_of_another_length_is_dropped_with_a_warning() -> None:
    samplers = [Lengths([0], [1]), Lengths([0], length=1)]
    feeds = [make_feed(DataLoader(DATA, batch_sampler=s), World(), seed=5) for s in samplers]  # type: ignore[arg-type]
    next(feeds[0].epoch(0))
    feeds[1].drawn = feeds[0].drawn
    assert feeds[1].drawn is not None
    with pytest.warns(UserWarning, match="the state of a Lengths of 2, which is not restored to the Lengths of 1"):
        feeds[1].place_sampler(1)
    assert samplers[1].drawn == 0
