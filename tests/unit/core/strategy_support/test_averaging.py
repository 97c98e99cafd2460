"""Averages on servers include each update, of any worker and any staleness."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.parameter_server.optimizer_parts import sliced
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import ReadState, Reply, ServerInit, Settings, StartAverage
from fabricx.parameter_server.wire.partition import divide
from fabricx.testing.simulated_server import simulate

NOTHING = torch.empty(0)


class RecordingServer:
    """A server that records its weights after each update."""

    def __init__(self, server: Server) -> None:
        self.server, self.weights = server, [server.values.clone()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def handle(self, *args: Any) -> Any:
        answer = self.server.handle(*args)
        assert self.server.version - len(self.weights) <= 0
        if self.server.version == len(self.weights):
            self.weights.append(self.server.values.clone())
        return answer


def gradient(lease: int, weights: Tensor) -> Tensor:
    return weights - lease / 10 + torch.arange(5) / 7


def uneven(worker: int, lease: int) -> float:
    return (1.0, 1.7, 4.0)[worker] + 0.01 * (lease % 3)


@pytest.mark.parametrize("rule", [AverageRule(0.7), AverageRule(0.7, every=2, start=3), AverageRule(0.7, every=3)])
@pytest.mark.parametrize("settings", [{"aggregate": False, "damp": True}, {"aggregate": True, "max_staleness": 0}])
def test_a_server_averages_the_weights_of_each_update(rule: AverageRule, settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 5))
    [shard] = divide([[5]], 1)
    copies, pieces = sliced([torch.optim.SGD([parameter], lr=0.5, momentum=0.5)], [parameter], shard)
    server = Server(3)
    server.handle(
        0, ServerInit(Settings(workers=3, **settings), copies, pieces, shard, torch.float32, 0), NOTHING, NOTHING
    )
    watched, step = RecordingServer(server), 5  # updates of the run before
    server.handle(0, StartAverage(rule, step, parameter.detach().clone()), NOTHING, NOTHING)
    simulate(server.init, 30, gradient, uneven, server=cast(Server, watched))
    assert len(watched.weights) > 10
    assert torch.equal(watched.weights[-1], server.values)

    wanted, updates = parameter.detach().clone(), 0
    for number, weights in enumerate(watched.weights[1:], step + 1):
        if number % rule.every:
            continue
        if number <= rule.start:
            wanted = weights.clone()
        else:
            wanted, updates = rule.decay * wanted + (1 - rule.decay) * weights, updates + 1
    reply = server.handle(0, ReadState("average"), NOTHING, NOTHING)
    assert isinstance(reply, Reply)
    assert reply.content[1] == updates
    torch.testing.assert_close(reply.content[0], wanted)

    # A later request, for example of a worker that has reconnected, has no effect.
    server.handle(1, StartAverage(rule, 0, torch.zeros(5)), NOTHING, NOTHING)
    torch.testing.assert_close(server.handle(0, ReadState("average"), NOTHING, NOTHING).content[0], wanted)


def test_the_average_begins_with_the_weights_at_its_start() -> None:
    rule, average = AverageRule(0.5, every=4, start=6), [torch.zeros(1)]
    steps = [rule.follow(average, [torch.full((1,), float(step))], step - 1, step) for step in range(1, 9)]
    assert (steps, average[0].item()) == ([0] * 7 + [1], 7.0)  # the mean of the weights of the steps 6 and 8
    average = [torch.zeros(1)]
    rule.follow(average, [torch.full((1,), 3.0)], 0, 3)
    assert rule.follow(average, [torch.full((1,), 12.0)], 3, 12) == 2  # the steps 8 and 12, and not 4
