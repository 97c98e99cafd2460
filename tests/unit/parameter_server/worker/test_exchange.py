"""The contract of an exchange: methods that a strategy may call, with and without servers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.exchange import Exchange, NoExchange
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum

CONTRACT = [name for name, member in inspect.getmembers(Exchange, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("exchange", [Client, SharedMemorySum, NoExchange])
@pytest.mark.parametrize("name", CONTRACT)
def test_each_exchange_takes_the_same_arguments(exchange: type[Exchange], name: str) -> None:
    arguments = [
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(kind, name)).parameters.values()]
        for kind in (exchange, Exchange)
    ]
    assert arguments[0] == arguments[1]


def test_a_worker_that_has_not_joined_exchanges_nothing() -> None:
    exchange, parameter = NoExchange(), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    exchange.register_grad_hooks()()
    assert not exchange.connected
    assert not exchange.push([parameter.grad])
    exchange.pull_sums(1)
    assert torch.equal(parameter.grad, torch.ones(2))
    assert (exchange.traffic, exchange.error_feedback, exchange.remote.counts()) == ((0, 0), [], [])
    exchange.close()
