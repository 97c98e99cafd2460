"""Weights are pulled before the step, or during the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.parameter_server.wire.messages import Reply
from fabricx.parameter_server.worker.pull_timing import BeforeStep, DuringForward, NoPulls


class Weights:
    """Pulls that arrive when finished; records the waits."""

    def __init__(self) -> None:
        self.waited: list[set[int]] = []
        self.pulled: list[tuple[int, bool]] = []
        self._arrived: list[Callable[[Reply, set[int]], None]] = []
        self.late: set[int] = set()

    def pull(self, targets: Any, version: int, *, to_train: bool, one_by_one: bool) -> Reply:
        self.pulled.append((version, one_by_one))
        return Reply(version=version)

    def begin(self, version: int, arrived: Callable[[Reply, set[int]], None]) -> None:
        self._arrived = [arrived]

    def await_parameters(self, numbers: set[int]) -> None:
        self.waited.append(numbers)

    def finish(self) -> None:
        for arrived in self._arrived:
            arrived(Reply(version=7), self.late)
        self._arrived = []


class Net(nn.Module):
    """Has a direct parameter and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs * self.scale)  # type: ignore[no-any-return]


@pytest.fixture
def weights() -> Any:
    return Weights()


def test_weights_before_the_step_are_recorded_immediately(weights: Any) -> None:
    noted: list[int] = []
    BeforeStep(weights, []).pull(3, lambda reply: noted.append(reply.version), one_by_one=True)
    assert (noted, weights.pulled) == ([3], [(3, True)])


def test_each_module_waits_for_its_direct_parameters(weights: Any) -> None:
    net, noted = Net(), []
    timing = DuringForward(weights, list(net.parameters()), net)
    timing.pull(3, lambda reply: noted.append(reply.version))
    timing.begin_step()
    assert (weights.waited, noted) == ([{0}], [])  # the scale; no wait for all weights yet
    loss = net(torch.ones(2)).sum()
    assert weights.waited == [{0}, {1, 2}]
    timing.settle()
    assert noted == [7]
    timing.backward(loss.backward)
    timing.end()
    net(torch.ones(2))
    assert len(weights.waited) == 2  # the hooks are removed


def test_pulls_that_may_wait_for_other_workers_are_not_in_the_background(weights: Any) -> None:
    net, noted = Net(), []
    timing = DuringForward(weights, list(net.parameters()), net)
    timing.pull(3, lambda reply: noted.append(reply.version), one_by_one=True)
    assert (noted, weights.pulled) == ([3], [(3, True)])


def test_a_parameter_that_is_used_before_it_arrived_is_an_error(weights: Any) -> None:
    net = Net()
    timing = DuringForward(weights, list(net.parameters()), net)
    timing.pull(0, lambda reply: None)
    timing.begin_step()
    loss = nn.functional.linear(torch.ones(2), net.layer.weight).sum()  # without a call of the layer
    weights.late = {1, 2}
    timing.settle()
    with pytest.raises(RuntimeError, match=r"layer\.weight.*used before the newest value was received"):
        timing.backward(loss.backward)
    timing.begin_step()  # the next step has no pending pulls
    timing.backward(net(torch.ones(2)).sum().backward)


def test_without_pulls_a_step_does_not_wait() -> None:
    timing, done = NoPulls(), []
    timing.pull(3, done.append)
    timing.begin_step()
    timing.backward(lambda: done.append("computed"))
    timing.settle()
    timing.end()
    assert done == ["computed"]
