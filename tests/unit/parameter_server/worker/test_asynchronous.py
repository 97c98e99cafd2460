"""Common state of workers at their own pace when they meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.parameter_server.optimizer_parts import groups_of
from fabricx.parameter_server.wire.messages import Counts, Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.dealer import LeaseDealer
from fabricx.parameter_server.worker.pull_timing import NoPulls


def worker(rate: float) -> tuple[Asynchronous, LeaseDealer, torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    groups: list[Any] = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 7.0}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    pace = Asynchronous(Settings(2))
    client: Any = SimpleNamespace(remote=SimpleNamespace(counts=lambda: [Counts(), Counts(conflicts=1)]))
    pace.connect(SimpleNamespace(size=2), client, parameters, [optimizer], NoPulls())  # type: ignore[arg-type]
    return pace, LeaseDealer(pace), optimizer


def test_hyperparameters_of_the_newest_update_are_used() -> None:
    (protocol, behind, optimizer), (_, _, ahead) = worker(0.1), worker(0.2)
    replies = [(4, groups_of([optimizer])), (5, groups_of([ahead])), (-1, groups_of([optimizer]))]
    protocol.world.gather_objects = lambda value: replies  # type: ignore[method-assign]
    behind.join_hyperparameters()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 7.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_different_settings_of_workers_are_an_error_at_connection() -> None:
    with pytest.raises(RuntimeError, match=r"self\.global_step alone.*scheduler"):
        worker(0.1)[0].meet()
