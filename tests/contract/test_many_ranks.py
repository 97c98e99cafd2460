"""Launches of many ranks in virtual time: messages of a rank do not increase with the number of ranks."""

from __future__ import annotations

import pytest

from fabricx.distributed.store.server import UNPROVEN
from tests.bench.simulation import Costs, Launched, simulated


@pytest.fixture(scope="module")
def small() -> Launched:
    return simulated(16, Costs())


def test_the_number_of_requests_is_independent_of_the_number_of_ranks_and_zero_during_training(small: Launched):
    large = simulated(256, Costs())
    assert large.train.requests == small.train.requests == 0
    assert large.join.requests / 256 <= small.join.requests / 16
    assert large.leave.requests / 256 == small.leave.requests / 16 == 3
    assert large.stop.requests / 256 < 7
    assert large.join.sent / 256 < 1.5 * small.join.sent / 16  # the main rank reads the names of all
    assert max(large.stop.sent, large.leave.sent) / 256 < 1.1 * max(small.stop.sent, small.leave.sent) / 16
    assert large.boundary <= 1


def test_ranks_that_connect_at_the_same_time_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.bench.simulation.SPREAD_S", 0.0)
    result = simulated(UNPROVEN + 88, Costs(latency=0.05))  # as between continents
    assert result.waiting >= 88
    assert result.join.seconds < 5.0


def test_simulated_times_match_the_cost_model(small: Launched):
    slow = simulated(16, Costs(latency=0.1))
    assert small.leave.seconds < 0.005
    assert 0.6 <= slow.leave.seconds < 0.61  # three sequential requests
    assert small.leave.busy == pytest.approx(16 * 3 * Costs.request, rel=0.5)
