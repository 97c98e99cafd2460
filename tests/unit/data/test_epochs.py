"""`set_epoch` is called on the user's samplers at any nesting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from fabricx.data import CombinedLoader, make_feed
from fabricx.data.epochs import set_epoch_of_loader
from fabricx.distributed.world import World

DATA: Any = range(20)


class Batches(BatchSampler):
    """A custom class."""


class Turned(Sampler[int]):
    """Starts at the number of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return ((self.epoch + number) % 4 for number in range(4))


@pytest.mark.parametrize("kind", ["sampler", "batches of torch", "own batches", "loaders"])
def test_set_epoch_is_called_on_the_sampler_within_batch_samplers_and_loaders(kind: str) -> None:
    loader: Any = {
        "sampler": lambda: DataLoader(DATA, 2, sampler=Turned()),
        "batches of torch": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Turned(), 2, False)),
        "own batches": lambda: DataLoader(DATA, batch_sampler=Batches(Turned(), 2, False)),
        "loaders": lambda: CombinedLoader([DataLoader(DATA, batch_sampler=Batches(Turned(), 2, False))]),
    }[kind]()
    feed = make_feed(loader, World(), seed=5)
    orders = [torch.cat([torch.cat(list(pytree.tree_leaves(m.data))) for m in feed.epoch(epoch)]) for epoch in (0, 3)]
    assert [order.tolist() for order in orders] == [[0, 1, 2, 3], [3, 0, 1, 2]]


@pytest.mark.parametrize("joined", [False, True])
def test_set_epoch_is_called_on_a_distributed_sampler_within_a_batch_sampler(joined: bool) -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0)
    loader: Any = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False))
    feed = make_feed(CombinedLoader({"a": loader}) if joined else loader, World(), seed=5)
    orders = [[pytree.tree_leaves(micro.data)[0].tolist() for micro in feed.epoch(epoch)] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_set_epoch_is_called_on_data_set_samplers_and_loader_in_this_order() -> None:
    calls = []

    class Part:
        def __init__(self, name: str, **inside: Any) -> None:
            self.set_epoch = lambda epoch: calls.append((name, epoch))
            vars(self).update(inside)

    inner, data = Part("sampler of batches"), Part("data")
    set_epoch_of_loader(3, Part("loader", dataset=data, batch_sampler=Part("batches", sampler=inner), sampler=None))
    assert calls == [("data", 3), ("sampler of batches", 3), ("batches", 3), ("loader", 3)]
