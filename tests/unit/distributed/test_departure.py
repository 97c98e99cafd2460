"""A rank ends when all ranks have finished their last collective."""

from __future__ import annotations

import threading
import time

import pytest

from fabricx.distributed.departure import await_departure
from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.membership.generations import Generation, Membership, enter, membership
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from tests.unit.distributed.conftest import KEY


def world(server: StoreServer, rank: int = 0, size: int = 2) -> World:
    return World(rank=rank, size=size, store=PrivateStore(server.path, KEY))


def test_no_rank_leaves_before_all_ranks_have_finished_their_last_collective(server: StoreServer) -> None:
    """Also if a worker waits to join, which comes too late."""
    before = membership()
    enter(Membership(0, "", lambda kind, content: None))
    membership().on_message("generation", Generation(1, (0, 1, 2)))
    first, second = (world(server, rank) for rank in (0, 1))
    order: list[str] = []

    def leave() -> None:
        await_departure(second, 60.0)
        order.append("the second rank leaves")

    thread = threading.Thread(target=leave)
    thread.start()
    while not server.has(second.key("departure/0/1")):
        time.sleep(0.001)
    order.append("the first rank has done its last collective")
    await_departure(first, 60.0)
    thread.join()
    enter(before)
    assert order == ["the first rank has done its last collective", "the second rank leaves"]


def test_the_wait_for_an_ended_peer_is_bounded(server: StoreServer) -> None:
    await_departure(world(server), 0.0)
    await_departure(World())


@pytest.mark.parametrize("dies_while_others_wait", [False, True])
def test_a_worker_whose_end_is_recorded_is_not_awaited(server: StoreServer, dies_while_others_wait: bool) -> None:
    thread = threading.Thread(target=await_departure, args=(world(server), 3600.0))
    if dies_while_others_wait:
        thread.start()
        while not server.has(world(server).key("departure/0/count")):
            time.sleep(0.001)
    server.push(DEATHS, b"1")
    if not dies_while_others_wait:
        thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not server.has(world(server).key("departure/0/1"))


@pytest.mark.parametrize("size", [4, 4000])
def test_requests_of_a_rank_do_not_depend_on_the_number_of_ranks(server: StoreServer, size: int) -> None:
    """Of three ranks that have ended, two have reported before."""
    leaving, name = world(server, size=size), world(server).key("departure/0")
    for rank in {*range(1, size)} - {3}:
        server.set(f"{name}/{rank}", b"done")
    server.set(f"{name}/count", str(size - 2).encode())
    for worker in (1, 2, 3):
        server.push(DEATHS, str(worker).encode())
    before = server.requests
    await_departure(leaving, 60.0)
    assert server.requests - before < 20


def test_a_worker_that_ends_during_its_report_is_not_awaited(server: StoreServer) -> None:
    """A report is two requests: a rank's key, and the count of all."""
    name = world(server).key("departure/0")
    thread = threading.Thread(target=await_departure, args=(world(server, size=3), 3600.0))
    thread.start()
    for rank in (1, 2):
        server.set(f"{name}/{rank}", b"done")
    PrivateStore(server.path, KEY).add(f"{name}/count", 1)  # of rank 2
    server.push(DEATHS, b"1")
    thread.join(60)
    assert not thread.is_alive()


def test_no_rank_waits_after_the_store_has_closed(server: StoreServer) -> None:
    leaving = world(server)
    server.close()
    await_departure(leaving, 3600.0)
