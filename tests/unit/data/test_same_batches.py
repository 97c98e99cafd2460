"""A stream that each rank reads whole is a warning; streams that differ by rank, and dummy batches, are none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from fabricx.data.iterable import ListFeed
from fabricx.data.same_batches import advise_on_same_batches, digest_of
from fabricx.distributed.world import World
from fabricx.errors import PossibleUserWarning


class Whole(IterableDataset[Any]):
    """Stream that ignores the rank."""

    def __iter__(self) -> Any:
        yield from (torch.arange(2.0) + number for number in range(2))


class Sized(Whole):
    """Stream with a length."""

    def __len__(self) -> int:
        return 2


class Pair(World):
    """Rank 0 of two ranks that hold the same objects and never end before each other."""

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj] * 2

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        return tensor.max().repeat(2)


def advice(digests: list[str | None], rank: int = 0) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advise_on_same_batches(Whole(), digests, World(rank=rank, size=len(digests)))
    return [str(warning.message) for warning in caught]


def test_equal_first_batches_of_two_ranks_are_a_warning_of_the_main_rank() -> None:
    [text] = advice(["a", "b", "a"])
    assert "Whole" in text
    assert "3 ranks" in text
    assert "RANK" in text
    assert "use_distributed_sampler=False" in text
    assert not advice(["a", "a"], rank=1)


def test_batches_that_differ_or_do_not_identify_samples_are_no_warning() -> None:
    assert not advice(["a", "b"])
    assert not advice([None, None])


@pytest.mark.parametrize("batch", [torch.zeros(4), [1, "text"], {"x": torch.ones(2), "y": torch.zeros(0)}, object()])
def test_batches_without_samples_have_no_digest(batch: Any) -> None:
    assert digest_of(batch) is None


def test_a_digest_is_that_of_all_tensors() -> None:
    first, second = {"x": torch.arange(3), "y": [torch.ones(2)]}, {"x": torch.arange(3), "y": [torch.zeros(2)]}
    assert digest_of(first) == digest_of({"x": torch.arange(3), "y": [torch.ones(2)]}) != digest_of(second)
    assert digest_of(torch.eye(2, dtype=torch.bfloat16, requires_grad=True)) is not None


@pytest.mark.parametrize("kind", [Whole, Sized])
def test_the_feed_of_an_undivided_stream_warns_in_the_first_epoch_only(kind: type[Whole]) -> None:
    feed = ListFeed(kind(), Pair(rank=0, size=2), float("inf"), compares=True)
    with pytest.warns(PossibleUserWarning, match=f"same first batch of {kind.__name__}"):
        assert len([micro for micro in feed.epoch(0) if not micro.empty]) == 2
    assert len([micro for micro in feed.epoch(1) if not micro.empty]) == 2  # warnings are errors
