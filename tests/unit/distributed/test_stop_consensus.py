"""Ranks agree to stop at the same boundary."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.stop_consensus import Agreement, StopRequests
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from tests.unit.distributed.conftest import KEY


class AnswersLate:
    """A store without requests of other ranks; this rank requests a stop during a read."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    def check(self, keys: list[str]) -> bool:
        self.agreement.request("should_stop")
        return False


def test_a_request_of_this_rank_is_kept_by_a_read_of_the_store_that_started_earlier() -> None:
    agreement = Agreement(World(), "stop")
    store: Any = AnswersLate(agreement)
    agreement._read_request(store, ["requested"])
    assert agreement.reason == "should_stop"
    assert agreement.at_boundary(1)


def agreements(server: StoreServer, ranks: int, **options: Any) -> list[Agreement]:
    return [
        Agreement(World(rank=rank, size=ranks, store=PrivateStore(server.path, KEY)), "signal", **options)
        for rank in range(ranks)
    ]


def test_a_rank_that_has_ended_is_not_awaited(server: StoreServer) -> None:
    server.push(DEATHS, b"1")  # as the server of a launch's store does
    agreement, _ = both = agreements(server, 2)
    agreement.request("terminated")
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        agreement.at_boundary(0)
    for consensus in both:
        consensus.close()


def test_ranks_that_receive_a_request_at_different_boundaries_stop_at_the_same_boundary(server: StoreServer) -> None:
    ranks = agreements(server, 3)
    stopped: list[int] = []

    def train(agreement: Agreement, ahead: int) -> None:
        for index in range(ahead):  # passes these boundaries before any request
            assert not agreement.at_boundary(index)
        ready.wait(30)
        if ahead == 2:
            agreement.request("terminated")
        index = ahead
        while not agreement.at_boundary(index):
            index += 1
            time.sleep(0.002)  # as long as a step: ranks in lockstep are at most a step apart
        stopped.append(index)

    ready = threading.Barrier(3)
    threads = [threading.Thread(target=train, args=(rank, ahead)) for rank, ahead in zip(ranks, (2, 5, 9), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stopped) == 3
    assert len(set(stopped)) == 1
    assert stopped[0] >= 9
    for agreement in ranks:
        agreement.close()


def stops(server: StoreServer, requests: list[dict[int, str]], minimum: int) -> list[tuple[int, str | None]]:
    """Return the boundary and the reason at which each rank stops.

    Args:
        server: the run's store.
        requests: by rank: reasons, by the boundary before which the rank requests the stop.
        minimum: boundary before which only signals stop the ranks.
    """
    results: list[tuple[int, str | None]] = []

    def train(rank: int) -> None:
        requested = StopRequests(World(rank=rank, size=len(requests), store=PrivateStore(server.path, KEY)))
        ready.wait(30)
        index, reason = 0, None
        while reason is None and index < 5000:
            index += 1
            if index in requests[rank]:
                requested.request(requests[rank][index])
            reason = requested.at_boundary(index, delayed=index < minimum)
            time.sleep(0.002)
        results.append((index, reason))
        requested.close()

    ready = threading.Barrier(len(requests))
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("requests", [
    [{3: "terminated"}, {}],  # a signal is not delayed
    [{1: "should_stop", 3: "terminated"}, {}],  # also after a request that is
    [{3: "terminated"}, {1: "should_stop"}],
    [{3: "terminated"}, {3: "should_stop", 9: "should_stop"}],  # both at once: the reason is the same on all ranks
], ids=["alone", "after its own", "after another's", "at once"])  # fmt: skip
def test_a_signal_stops_all_ranks_before_a_delayed_request(
    server: StoreServer, requests: list[dict[int, str]]
) -> None:  # fmt: skip
    first, second = stops(server, requests, minimum=5000)
    assert first == second
    assert first[1] == "terminated"


def test_a_delayed_request_stops_all_ranks_when_the_minimum_is_reached(server: StoreServer) -> None:
    first, second = stops(server, [{2: "should_stop"}, {}], minimum=20)
    assert first == second
    assert first[0] >= 20
    assert first[1] == "should_stop"


def test_a_boundary_sends_no_request_to_the_store(server: StoreServer) -> None:
    ranks = agreements(server, 2)
    topics = [Agreement(agreement._world, "settings/0", beside=agreement) for agreement in ranks]
    probe = PrivateStore(server.path, KEY)
    while [len(waits[None]) for waits in server._state._waits.values()] != [2, 2, 2]:  # both ranks wait for three keys
        time.sleep(0.01)
    before = server.requests
    for index in range(1000):
        for agreement in (*ranks, *topics):
            assert not agreement.at_boundary(index)
    assert server.requests == before
    topics[0].request("changed")
    while topics[1].reason is None:
        time.sleep(0.01)
    # The request; and of each rank the answer of two, and the next wait.
    assert server.requests - before <= 1 + 2 * 3
    assert ranks[1].reason is None
    probe.set("stop/requested", "terminated")  # as a supervisor does
    while any(agreement.reason is None for agreement in ranks):
        time.sleep(0.01)
    for agreement in ranks:
        agreement.close()
