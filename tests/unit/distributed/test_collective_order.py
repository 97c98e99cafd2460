"""Ranks that communicate the same in the same order find nothing; others are told at the first difference."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from fabricx.distributed.collective_order import SLOTS, CollectiveOrder
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree


def ranks(size: int) -> list[CollectiveOrder]:
    store = HashStore()
    return [CollectiveOrder(World(rank=rank, size=size, store=store)) for rank in range(size)]


def test_ranks_in_one_order_find_nothing_and_keep_a_bounded_number_of_keys() -> None:
    store = HashStore()
    several = [CollectiveOrder(World(rank=rank, size=3, store=store)) for rank in range(3)]
    for number in range(3 * SLOTS):
        for one in several[number % 3 :] + several[: number % 3]:  # each comes first now and then
            one.note(f"gathers the weights of {number % 5}")
    assert store.num_keys() <= SLOTS + 1


@pytest.mark.parametrize("before", [0, 1, SLOTS - 1, SLOTS, 5 * SLOTS + 3])
def test_the_first_difference_is_named_whoever_comes_first(before: int) -> None:
    for first, second in ((0, 1), (1, 0)):
        several = ranks(2)
        for _ in range(before):
            for one in several:
                one.note("gathers the weights of a")
        several[first].note(f"does {first}")
        with pytest.raises(RanksDisagree, match="rank 0 does 0, rank 1 does 1"):
            several[second].note(f"does {second}")


def test_a_rank_may_be_ahead() -> None:
    one, other = ranks(2)
    for what in ("a", "b", "c"):
        one.note(what)
    for what in ("a", "b"):
        other.note(what)
    with pytest.raises(RanksDisagree, match="rank 0 c, rank 1 b"):
        other.note("b")
