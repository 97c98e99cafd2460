"""The order of data is cut without loss, repetition or padding, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch

from fabricx.data.order import Cut, epoch_order


@pytest.mark.parametrize("items", [0, 1, 2, 5, 16, 29, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("parts", [0, 5, 12])
def test_every_place_belongs_to_exactly_one_rank(items: int, ranks: int, accumulate: int, parts: int) -> None:
    cuts = [Cut(items, 4, rank, ranks, accumulate, parts=parts) for rank in range(ranks)]
    places = sorted(place for cut in cuts for share in cut.shares() for place in range(share.begin, share.end))
    assert places == list(range(items))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("began_with", [0, 2, 5])
@pytest.mark.parametrize("parts", [0, 5])
def test_all_ranks_have_as_many_microbatches_as_the_length_says(
    ranks: int, accumulate: int, began_with: int, parts: int
) -> None:
    for items in range(40):
        cuts = [Cut(items, 4, rank, ranks, accumulate, began_with, parts) for rank in range(ranks)]
        assert {len(list(cut.shares())) for cut in cuts} == {len(cuts[0])}


@pytest.mark.parametrize("items", [5, 16, 29])
def test_parts_are_the_same_whatever_the_number_of_ranks(items: int) -> None:
    found = set()
    for ranks in (1, 2, 3, 7):
        cuts = [Cut(items, 12, rank, ranks, began_with=1, parts=12) for rank in range(ranks)]
        found.add(tuple(sorted((s.begin, s.end) for cut in cuts for s in cut.shares() if s.begin < s.end)))
    assert len(found) == 1


def test_one_rank_gets_the_batches_that_a_plain_loader_gives() -> None:
    assert [(s.begin, s.end) for s in Cut(items=10, batch=4).shares()] == [(0, 4), (4, 8), (8, 10)]


def test_a_position_is_where_an_earlier_run_has_stopped_under_any_number_of_ranks() -> None:
    whole = Cut(items=50, batch=4, ranks=2)
    first = [s for rank in range(2) for s in Cut(50, 4, rank, 2).shares() if s.window_end <= 16]
    rest = [s for rank in range(4) for s in Cut(50, 2, rank, 4).shares(position=16)]
    assert whole.global_batch == Cut(50, 2, 0, 4).global_batch
    assert sorted(p for s in [*first, *rest] for p in range(s.begin, s.end)) == list(range(50))


def test_windows_open_and_close_once() -> None:
    for items in (7, 8, 23):
        shares = list(Cut(items, 2, 0, 1, 3).shares())
        assert sum(s.opens for s in shares) == sum(s.closes for s in shares)
        assert [s.last for s in shares] == [False] * (len(shares) - 1) + [True]


def test_an_epochs_order_is_a_permutation_that_only_seed_and_epoch_decide() -> None:
    first = epoch_order(100, seed=1, epoch=0)
    assert torch.equal(first, epoch_order(100, seed=1, epoch=0))
    assert sorted(first.tolist()) == list(range(100))
    assert not torch.equal(first, epoch_order(100, seed=1, epoch=1))
    assert not torch.equal(first, epoch_order(100, seed=2, epoch=0))
