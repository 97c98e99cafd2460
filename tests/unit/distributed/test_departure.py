"""A rank leaves a run when all ranks have finished their last collective."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fabricx.distributed.departure import await_departure
from fabricx.distributed.generations import ANY_DEATH, death_key
from fabricx.distributed.world import World


def test_no_rank_leaves_before_all_have_done_their_last_collective() -> None:
    store = dist.HashStore()
    first, second = (World(rank=rank, size=2, store=store) for rank in (0, 1))
    order: list[str] = []

    def leave() -> None:
        await_departure(second, 60.0)
        order.append("the second rank leaves")

    thread = threading.Thread(target=leave)
    thread.start()
    while not store.check([second.key("departure/0/1")]):
        time.sleep(0.001)
    order.append("the first rank has done its last collective")
    await_departure(first, 60.0)
    thread.join()
    assert order == ["the first rank has done its last collective", "the second rank leaves"]


def test_a_peer_that_is_gone_is_not_waited_for_without_end() -> None:
    store = dist.HashStore()
    await_departure(World(rank=0, size=2, store=store), 0.0)
    await_departure(World())


def test_a_worker_of_which_the_supervisor_says_that_it_is_gone_is_not_waited_for() -> None:
    store = dist.HashStore()
    for key in (death_key(1), ANY_DEATH):
        store.set(key, "")
    await_departure(World(rank=0, size=2, store=store), 3600.0)
    assert not store.check([World(rank=1, size=2, store=store).key("departure/0/1")])


def test_nothing_is_waited_for_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*arguments: object) -> None:
        raise dist.DistNetworkError

    store = dist.HashStore()
    world = World(rank=0, size=2, store=store)
    for name in ("set", "wait"):
        monkeypatch.setattr(dist.HashStore, name, closed)
        await_departure(world, 3600.0)
