"""The order of the data is divided without loss, repetition or padding, for any number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from fabricx.data.order import Balance, Cut, epoch_order
from tests.cases import check_each, product


def test_every_position_belongs_to_exactly_one_rank() -> None:
    cases = product(items=[0, 1, 2, 5, 16, 29, 100], ranks=[1, 2, 3, 7], accumulate=[1, 2, 3], parts=[0, 5, 12])
    check_each(_every_place_belongs_to_exactly_one_rank, cases)


def _every_place_belongs_to_exactly_one_rank(items: int, ranks: int, accumulate: int, parts: int) -> None:
    cuts = [Cut(items, 4, rank, ranks, accumulate, parts=parts) for rank in range(ranks)]
    places = sorted(position for cut in cuts for share in cut.shares() for position in range(share.begin, share.end))
    assert places == list(range(items))


def test_all_ranks_have_the_declared_number_of_microbatches() -> None:
    cases = product(ranks=[1, 2, 3], accumulate=[1, 3], began_with=[0, 2, 5], parts=[0, 5])
    check_each(_all_ranks_have_as_many_microbatches_as_the_length_says, cases)


def _all_ranks_have_as_many_microbatches_as_the_length_says(
    ranks: int, accumulate: int, began_with: int, parts: int
) -> None:
    for items in range(40):
        cuts = [Cut(items, 4, rank, ranks, accumulate, began_with, parts) for rank in range(ranks)]
        assert {len(list(cut.shares())) for cut in cuts} == {len(cuts[0])}


@pytest.mark.parametrize("items", [5, 16, 29])
def test_parts_are_equal_for_any_number_of_ranks(items: int) -> None:
    splits = set()
    for ranks in (1, 2, 3, 7):
        cuts = [Cut(items, 12, rank, ranks, began_with=1, parts=12) for rank in range(ranks)]
        splits.add(tuple(sorted((s.begin, s.end) for cut in cuts for s in cut.shares() if s.begin < s.end)))
    assert len(splits) == 1


@pytest.mark.parametrize("items", [1, 4, 12, 17])
def test_the_first_part_of_a_rank_has_a_sample(items: int) -> None:
    """The hooks of the first batch receive the index 0, which many of them test for."""
    for ranks in (1, 2, 3):
        for rank in range(min(ranks, items)):
            shares = list(Cut(items, 12, rank, ranks, began_with=1, parts=12).shares())
            assert shares[0].begin < shares[0].end
            if ranks == 1:
                assert all(share.begin < share.end for share in shares)


def test_a_single_rank_reads_the_batches_of_a_plain_loader() -> None:
    assert [(s.begin, s.end) for s in Cut(items=10, batch=4).shares()] == [(0, 4), (4, 8), (8, 10)]


def test_a_position_of_an_earlier_run_is_valid_for_any_number_of_ranks() -> None:
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


def test_the_order_of_an_epoch_is_a_permutation_determined_by_seed_and_epoch() -> None:
    first = epoch_order(100, seed=1, epoch=0)
    assert torch.equal(first, epoch_order(100, seed=1, epoch=0))
    assert sorted(first.tolist()) == list(range(100))
    assert not torch.equal(first, epoch_order(100, seed=1, epoch=1))
    assert not torch.equal(first, epoch_order(100, seed=2, epoch=0))


@pytest.mark.parametrize("items", [40, 43])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("most", [None, (4, 8, 3)])
def test_unequal_shares_divide_the_same_global_batches(
    items: int, accumulate: int, most: tuple[int, ...] | None
) -> None:
    balance = Balance()
    balance.change(0, 12, (5.0, 2.0, 1.0), most=most)
    ranks = [list(Cut(items, 4, rank, 3, accumulate, balance=balance).shares()) for rank in range(3)]
    equal = list(Cut(items, 4, 0, 3, accumulate).shares())
    windows = {(share.window_begin, share.window_end) for share in equal}
    assert {(share.window_begin, share.window_end) for shares in ranks for share in shares} == windows
    assert sorted(position for shares in ranks for s in shares for position in range(s.begin, s.end)) == list(
        range(items)
    )
    for shares in ranks:  # all ranks have the same microbatches, and count them as if shares were equal
        assert [(s.window_begin, s.opens, s.closes, s.last, s.incomplete) for s in shares] == [
            (s.window_begin, s.opens, s.closes, s.last, s.incomplete) for s in ranks[0]
        ]
        assert sum(not share.incomplete for share in shares) == len(equal)
        assert most is None or all(s.end - s.begin <= most[ranks.index(shares)] for s in shares if s.window_begin >= 12)


def test_a_rank_with_fewer_microbatches_has_its_own_at_the_end() -> None:
    balance = Balance()
    balance.change(0, 0, (3.0, 1.0), most=(4, 4))
    sizes = [[s.end - s.begin for s in Cut(16, 8, rank, 2, balance=balance).shares()] for rank in (0, 1)]
    assert sizes == [[4, 4, 4], [0, 0, 4]]


def test_remaining_samples_are_assigned_to_ranks_in_turn() -> None:
    balance = Balance()
    balance.change(0, 0, (1.0, 1.0, 1.0), turns=True)
    by_rank = [list(Cut(40, 5, rank, 3, began_with=2, balance=balance).shares()) for rank in range(3)]
    sizes = [[share.end - share.begin for share in shares] for shares in by_rank]
    assert sizes == [[4, 3, 3, 4], [3, 4, 3, 3], [3, 3, 4, 3]]


def test_shares_apply_from_a_position_and_for_the_same_number_of_ranks() -> None:
    balance = Balance()
    balance.change(0, 24, (1.0, 3.0))
    balance.change(1, 8, (3.0, 1.0))
    assert balance.at(0, 23, 2) is None
    applied = [balance.at(*position, 2) for position in ((0, 24), (0, 1000), (1, 0), (1, 8), (7, 0))]
    assert [shares.weights for shares in applied if shares] == [(1.0, 3.0)] * 3 + [(3.0, 1.0)] * 2
    assert balance.at(1, 8, 3) is None


def test_each_rank_computes_which_ranks_have_no_samples() -> None:
    cases = product(items=[1, 5, 17, 29], ranks=[2, 3, 7], accumulate=[1, 3], parts=[0, 5], balanced=[False, True])
    cases = [case for case in cases if not (case["parts"] and case["balanced"])]
    check_each(_each_rank_knows_which_ranks_have_nothing, cases)


def _each_rank_knows_which_ranks_have_nothing(
    items: int, ranks: int, accumulate: int, parts: int, balanced: bool
) -> None:
    balance = Balance()
    if balanced:
        balance.change(0, 0, tuple(1.0 + rank % 3 for rank in range(ranks)), most=(2,) * ranks)
    cuts = [Cut(items, 4, rank, ranks, accumulate, parts=parts, balance=balance) for rank in range(ranks)]
    for shares in zip(*(cut.shares() for cut in cuts), strict=True):
        idle = tuple(rank for rank, share in enumerate(shares) if share.begin == share.end)
        assert {share.idle for share in shares} == {idle}


@pytest.mark.parametrize("parts", [0, 1, 3, 8])
def test_a_cut_that_leaves_out_a_rank_has_an_empty_share(parts: int) -> None:
    for items, batch, ranks, accumulate, began in itertools.product(range(25), (1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 4)):
        cuts = [Cut(items, batch, rank, ranks, accumulate, began, parts) for rank in range(ranks)]
        empty = any(share.begin == share.end for cut in cuts for share in cut.shares())
        assert cuts[0].leaves_out == empty, cuts[0]
