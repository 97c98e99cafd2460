"""Ranks that communicate the same in the same order pass; a difference is an error that names both ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from fabricx.distributed.collective_order import SLOTS, CollectiveOrder, OrderInMemory, OrderInStore
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree


def in_store(size: int) -> list[CollectiveOrder]:
    store = HashStore()
    return [CollectiveOrder(World(rank=rank, size=size, store=store)) for rank in range(size)]


def in_memory(size: int) -> list[CollectiveOrder]:
    vectors = [torch.zeros(SLOTS * 256, dtype=torch.uint8) for _ in range(size)]
    several = in_store(size)
    for rank, order in enumerate(several):
        order._order = OrderInMemory(rank, vectors)
    return several


EACH = pytest.mark.parametrize("ranks", [in_store, in_memory])
Make = Callable[[int], list[CollectiveOrder]]


@EACH
def test_ranks_with_the_same_order_report_no_difference(ranks: Make) -> None:
    several = ranks(3)
    for number in range(3 * SLOTS):
        for order in several[number % 3 :] + several[: number % 3]:  # each is the first at some positions
            order.note(f"gathers the weights of {number % 5}")


def test_the_store_has_a_bounded_number_of_keys() -> None:
    store = HashStore()
    orders = [OrderInStore(World(rank=rank, size=2, store=store)) for rank in range(2)]
    assert not any(order.differing(position, "same") for position in range(3 * SLOTS) for order in orders)
    assert store.num_keys() <= SLOTS + 1


@EACH
@pytest.mark.parametrize("before", [0, 1, SLOTS - 1, SLOTS, 5 * SLOTS + 3])
def test_the_first_difference_is_named_for_any_order_of_the_ranks(ranks: Make, before: int) -> None:
    for first, second in ((0, 1), (1, 0)):
        several = ranks(2)
        for _ in range(before):
            for order in several:
                order.note("gathers the weights of a")
        several[first].note(f"does {first}")
        with pytest.raises(RanksDisagree, match="rank 0 does 0, rank 1 does 1"):
            several[second].note(f"does {second}")


@EACH
def test_a_rank_may_be_ahead(ranks: Make) -> None:
    ahead, other = ranks(2)
    for description in ("a", "b", "c"):
        ahead.note(description)
    for description in ("a", "b"):
        other.note(description)
    with pytest.raises(RanksDisagree, match="rank 0 c, rank 1 b"):
        other.note("b")


def test_ranks_that_read_too_early_report_the_difference_at_their_next_collective() -> None:
    first, second = in_memory(2)
    memory = first._order
    assert isinstance(memory, OrderInMemory)
    others, memory._others = memory._others, {}  # rank 1 seems to have written nothing
    second.note("gathers b")
    first.note("gathers a")
    memory._others = others
    with pytest.raises(RanksDisagree, match="rank 0 gathers a, rank 1 gathers b"):
        first.note("gathers c")


def test_long_descriptions_differ_by_their_ends() -> None:
    first, second = in_memory(2)
    first.note("gathers the weights of " + "layer." * 60 + "a")
    with pytest.raises(RanksDisagree, match="gathers the weights of layer"):
        second.note("gathers the weights of " + "layer." * 60 + "b")
