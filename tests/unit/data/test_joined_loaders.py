"""A joined loader yields the batches of several loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabricx.data import CombinedLoader
from fabricx.data.combined import MODES
from fabricx.data.joined_loaders import joined
from fabricx.data.loader_order import is_ordered
from tests.unit.data.number_loaders import Numbers, Stream, loader, plain


@pytest.mark.parametrize("mode", MODES)
def test_a_joined_loader_yields_the_batches_of_the_parallel_loaders(mode: Any) -> None:
    both = CombinedLoader({"a": loader(0, 3), "b": [loader(10, 10, 4, drop_last=True), loader(20, 2)]}, mode)
    by_hand = [batch for batch, _, _ in both]
    as_one = joined(both, ranks=2)
    assert is_ordered(as_one)
    assert [plain(batch) for batch in as_one] == [plain(batch) for batch in by_hand]
    assert len(as_one) == len(both) == len(by_hand) == {"min_size": 1, "sequential": 5}.get(mode, 2)


def test_samples_without_batching_and_custom_batch_samplers_are_joined() -> None:
    custom = DataLoader(Numbers(0, 5), batch_sampler=[[4, 0], [3]])
    alone = DataLoader(Numbers(50, 3), batch_size=None)
    as_one = joined(CombinedLoader((custom, alone), "max_size"), ranks=1)
    assert [(plain(a), b) for a, b in as_one] == [([4, 0], 50), ([3], 51), (None, 52)]


def test_a_shorter_loader_is_reshuffled_when_it_starts_again() -> None:
    both = CombinedLoader([loader(0, 40, 1), loader(100, 8, 1, shuffle=True)], "max_size_cycle")
    torch.manual_seed(3)
    numbers = [int(b) for _, b in joined(both, ranks=1)]
    rounds = [tuple(numbers[at : at + 8]) for at in range(0, 40, 8)]
    assert all(sorted(part) == list(range(100, 108)) for part in rounds)
    assert len(set(rounds)) > 1


def test_loader_processes_make_the_same_batches() -> None:
    both = CombinedLoader({"a": loader(0, 6, num_workers=1), "b": loader(10, 6)}, "min_size")
    assert [plain(batch) for batch in joined(both, ranks=1)] == [plain(batch) for batch, _, _ in both]


def test_streams_are_read_unchanged_and_not_beside_divided_data() -> None:
    stream, divided = DataLoader(Stream(), batch_size=2), loader(0, 4)
    with pytest.raises(ValueError, match=r"samples are divided over the 2 ranks, and a .* each rank reads whole"):
        joined(CombinedLoader([stream, divided]), ranks=2)
    assert [plain(a) for a, _ in joined(CombinedLoader([stream, divided]), ranks=1)] == [[0, 1], [2, 3]]
