"""The user's optimizers on a worker, while servers have their state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.parameter_server.optimizer_parts import ServerOptimizers, sliced
from fabricx.parameter_server.wire.partition import divide
from fabricx.parameter_server.worker.worker_optimizers import WorkerOptimizers


def of_one_parameter() -> tuple[nn.Parameter, torch.optim.Optimizer, WorkerOptimizers]:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    return parameter, optimizer, WorkerOptimizers([optimizer], [parameter])


def test_hyperparameters_of_another_worker_are_adopted() -> None:
    _, optimizer, optimizers = of_one_parameter()
    groups = optimizers.groups()
    groups[0][0]["lr"] = 0.25
    optimizers.set_groups(groups)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_an_optimizer_steps_with_the_hyperparameters_of_its_step() -> None:
    _, optimizer, optimizers = of_one_parameter()
    optimizers.keep_groups(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25  # of the next step
    assert optimizers.groups()[0][0]["lr"] == 0.5
    optimizers.end_update()
    assert optimizers.groups()[0][0]["lr"] == 0.25


def test_a_parameter_that_servers_do_not_have_is_an_error() -> None:
    _, optimizer, optimizers = of_one_parameter()
    optimizers.check_parameters()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="had 1 parameters when training began and have 2 now"):
        optimizers.check_parameters()


def test_server_state_is_held_only_for_a_checkpoint() -> None:
    parameter, optimizer, optimizers = of_one_parameter()
    servers = []
    for number, shard in enumerate(divide([[4]], 2)):
        packed, pieces = sliced([optimizer], [parameter], shard)
        [stepped] = packed.unpack(pieces)
        for piece in pieces:
            piece.grad = torch.full_like(piece, 1.0 + number)
        stepped.step()
        servers.append(ServerOptimizers(shard, sliced([stepped], pieces, divide([[2]], 1)[0])[0]))
    with optimizers.holding(servers):
        assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert not optimizer.state
