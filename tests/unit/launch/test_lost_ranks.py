"""A rank ends if it is blocked and another rank has ended before it had left the run."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.membership.lost_operations import BlockedMainThread
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.launch.launch_watch import watched
from fabricx.launch.lost_ranks import CHECKS, LostRanks

KEY = b"k" * 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "private").mkdir(mode=0o700)
    with contextlib.closing(StoreServer(str(tmp_path / "private"), KEY)) as server:
        yield server


def ranks_of(server: StoreServer, rank: int = 0, *, waits: bool = True) -> LostRanks:
    """Return the view of a rank whose main thread uses no CPU time."""
    used = itertools.repeat(1.0)
    blocked = BlockedMainThread(lambda: next(used), lambda: waits, CHECKS)
    return LostRanks(World(rank=rank, size=2, store=PrivateStore(server.path, KEY)), blocked)


def checked(ranks: LostRanks) -> str:
    """Return the error of a rank that is blocked for several checks; the thread may read the store late."""
    deadline = time.monotonic() + 20
    while not ranks._lost and time.monotonic() < deadline and ranks._thread.is_alive():
        time.sleep(0.01)
    errors = [ranks.check() for _ in range(CHECKS + 1)]
    assert not any(errors[:CHECKS])
    return str(errors[-1] or "")


def test_a_blocked_rank_ends_when_another_rank_is_lost(server: StoreServer) -> None:
    with contextlib.closing(ranks_of(server)) as ranks:
        assert not any(ranks.check() for _ in range(2 * CHECKS))  # it waits for a slow rank
        server.push(DEATHS, b"1")
        assert checked(ranks).startswith("rank 1 has ended, or its machine is unreachable")


def test_a_rank_that_is_not_blocked_continues(server: StoreServer) -> None:
    with contextlib.closing(ranks_of(server, waits=False)) as ranks:
        server.push(DEATHS, b"1")
        assert not checked(ranks)


def test_a_rank_that_has_finished_is_not_lost(server: StoreServer) -> None:
    other = ranks_of(server, rank=1)
    with contextlib.closing(ranks_of(server)) as ranks:
        with watched(other._world, lambda error: None, other):
            pass
        server.push(DEATHS, b"1")
        server.push(DEATHS, b"2")  # a server of the launch, which has not finished
        assert checked(ranks).startswith("rank 2 ")


def test_the_loss_of_the_machine_with_the_store_is_a_loss_of_rank_0(server: StoreServer) -> None:
    with contextlib.closing(ranks_of(server, rank=1)) as ranks:
        while not server.used:
            time.sleep(0.01)
        server.close()
        assert checked(ranks).startswith("rank 0 of this launch has ended, or its machine is unreachable")
        ranks.leave()  # without an error
