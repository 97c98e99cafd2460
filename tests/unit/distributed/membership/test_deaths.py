"""Deaths of workers in the store."""

from __future__ import annotations

from fabricx.distributed.membership.deaths import DEATHS, Deaths
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from tests.unit.distributed.conftest import KEY


def test_each_death_is_read_once_and_the_next_death_can_be_awaited(server: StoreServer) -> None:
    store = PrivateStore(server.path, KEY)
    deaths = Deaths(store)
    assert deaths.read() == set()
    assert store.reach(deaths.condition, 0.0) == []
    for worker in (5, 0):
        server.push(DEATHS, str(worker).encode())
        assert store.reach(deaths.condition, 60.0) == [*deaths.condition]
        assert worker in deaths.read()
    before = server.requests
    assert deaths.read() == {0, 5}
    assert server.requests == before + 1
