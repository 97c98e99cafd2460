"""A user's subclass of DataLoader yields the same batches in a run as in a script, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabricx.data import CombinedLoader, make_feed
from fabricx.data.loader_classes import fetches_lists, reads_otherwise
from fabricx.distributed.world import World
from fabricx.trainer.trial import other_batches, two_samples


class Windows:
    """A dataset that returns a batch for a list of indices."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, indices: Sequence[int]) -> dict[str, Any]:
        return {"x": torch.tensor(indices) * 10, "begins": list(indices)}


def as_it_is(batch: Any) -> Any:
    return batch


class ListLoader(DataLoader[Any]):
    """Passes all indices of a batch to the dataset, as the loaders of torch_spatiotemporal."""

    @property
    def _auto_collation(self) -> bool:
        return False

    @property
    def _index_sampler(self) -> Any:
        return self.batch_sampler


class Reversed(DataLoader[Any]):
    """Yields the batches in a different order."""

    @property
    def _index_sampler(self) -> Any:
        return list(self.batch_sampler or ())[::-1]


class Short(DataLoader[Any]):
    """Declares two of its batches, as for an epoch that ends early."""

    def __len__(self) -> int:
        return 2


class Counts(DataLoader[Any]):
    def __len__(self) -> int:
        return len(self.batch_sampler or ())  # type: ignore[arg-type]


def read(loader: Any, **world: int) -> list[Any]:
    feed = make_feed(loader, World(**world), seed=5)
    assert (len(loader) if world else feed.batches()) == len(loader)
    return [micro.data for micro in feed.epoch(0) if not micro.empty]


def list_loader(**options: Any) -> ListLoader:
    data: Any = Windows()
    return ListLoader(data, batch_size=4, collate_fn=as_it_is, **options)


def begins(batches: list[Any]) -> list[list[int]]:
    return [batch["begins"] for batch in batches]


def test_a_loader_may_pass_all_indices_of_a_batch_to_the_dataset() -> None:
    loader = list_loader()
    assert begins(read(loader)) == begins(list(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert begins(read(list_loader(drop_last=True))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    subclass = ListLoader(loader.dataset, batch_sampler=[[3, 1], [2]], collate_fn=as_it_is)  # type: ignore[arg-type]
    assert begins(read(subclass)) == begins(list(subclass)) == [[3, 1], [2]]
    shuffled = begins(read(list_loader(shuffle=True)))
    assert [len(batch) for batch in shuffled] == [4, 4, 2]
    assert sorted(itertools.chain.from_iterable(shuffled)) == list(range(10))


def test_samples_of_a_subclass_are_divided_over_ranks() -> None:
    read_by = [begins(read(list_loader(), rank=rank, size=2)) for rank in (0, 1)]
    assert read_by == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]]


def test_a_subclass_makes_its_batches_in_loader_processes() -> None:
    assert begins(read(list_loader(num_workers=1))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_subclass_is_read_beside_other_loaders() -> None:
    numbers: Any = range(6)
    both = CombinedLoader({"windows": list_loader(), "numbers": DataLoader(numbers, batch_size=3)}, "max_size_cycle")
    batches = read(both)
    assert begins([batch["windows"] for batch in batches]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch["numbers"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_trial_of_the_step_receives_batches_of_the_subclass() -> None:
    assert two_samples(list_loader())["begins"] == [0, 1]
    assert all(len(batch["begins"]) == 2 for batch in other_batches(list_loader()))


def test_a_loader_with_its_own_batch_order_or_length_is_read_unchanged() -> None:
    numbers: Any = range(10)
    assert [batch.tolist() for batch in read(Reversed(numbers, batch_size=4))] == [[8, 9], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert [batch.tolist() for batch in read(Short(numbers, batch_size=4))] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for kind in (Reversed, Short):
        with pytest.raises(ValueError, match=f"{kind.__name__} changes how a DataLoader is read, so the samples"):
            make_feed(kind(numbers, batch_size=4), World(size=2), seed=5)


def test_a_subclass_without_overrides_is_divided() -> None:
    numbers: Any = range(10)
    assert not reads_otherwise(Counts(numbers, batch_size=4))
    assert not fetches_lists(DataLoader(numbers, batch_size=None))
    assert not fetches_lists(DataLoader(numbers))
