"""A strategy with servers that is not connected: a description that can be pickled, and no exchange."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.strategies import AsyncSGD, ParameterServer

PRESETS: dict[str, Any] = {
    "lockstep": ParameterServer,
    "no servers": lambda: ParameterServer(servers=0),
    "asynchronous": AsyncSGD,
    "rounds": lambda: AsyncSGD(every=2, outer="nesterov"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_before_training_there_is_nothing_to_exchange(name: str) -> None:
    strategy = pickle.loads(pickle.dumps(PRESETS[name]()))
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    strategy.module = module
    assert (strategy.counts(), strategy.traffic, strategy.measured()) == ([], (0, 0), {})
    assert (strategy.waited_s, strategy.pushed_s, list(strategy.pushes)) == (0.0, 0.0, [])
    assert strategy.wait_for_weights(3) == 3
    assert strategy.read_average() == ({}, 0)
    assert not strategy.hides_gradients
    strategy.synchronize()
    assert set(strategy.state_dict(module, [optimizer])) == {"module", "optimizers"}
    strategy.teardown()


def test_only_asynchronous_strategies_deal_leases() -> None:
    dealt = {name: not make().traits.lockstep for name, make in PRESETS.items()}
    assert dealt == {"lockstep": False, "no servers": False, "asynchronous": True, "rounds": True}
