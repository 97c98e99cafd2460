"""Averages of optimizer states, with the other rank's state as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.statistics.optimizer_moments import average_moments
from fabricx.distributed.world import World


@dataclass(frozen=True)
class _Pair(World):
    """A world of two ranks, in which the second rank sends fixed values."""

    size: int = 2
    described: Any = None  # moments of the second rank by shape and dtype, and the rest of its state
    sums: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj, self.described]

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return tensor.add_(self.sums[tuple(tensor.shape)])


def stepped() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return parameter, optimizer


SHAPE = (torch.Size([3]), torch.float32)


def test_moments_are_averaged() -> None:
    parameter, optimizer = stepped()
    world = _Pair(described=({(0, "momentum_buffer"): SHAPE}, {}), sums={(3,): torch.full((3,), 5.0)})
    average_moments(world, optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [3.0] * 3


def test_the_moments_of_a_scalar_parameter_are_averaged_and_its_step_is_the_largest() -> None:
    parameter = nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(0.5, 0.5))
    parameter.grad = torch.tensor(2.0)
    optimizer.step()
    moments = {(0, name): (torch.Size([]), torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    world = _Pair(described=(moments, {0: {"step": torch.tensor(9.0)}}), sums={(): torch.tensor(5.0)})
    average_moments(world, optimizer)
    state = {name: float(value) for name, value in optimizer.state[parameter].items()}
    assert state == {"step": 9.0, "exp_avg": 3.0, "exp_avg_sq": 3.5}


def test_a_rank_that_has_not_stepped_receives_the_state_of_the_others() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    world = _Pair(described=({(0, "momentum_buffer"): SHAPE}, {0: {"step": 4}}), sums={(3,): torch.full((3,), 5.0)})
    average_moments(world, optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [5.0] * 3
    assert optimizer.state[parameter]["step"] == 4


def test_scalars_are_taken_from_the_rank_with_the_most_steps() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.NAdam([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    moments = {(0, name): SHAPE for name in ("exp_avg", "exp_avg_sq")}
    local = {name: float(optimizer.state[parameter][name]) for name in ("step", "mu_product")}
    for steps, product in ((1.0, 0.9), (2.0, 0.5), (3.0, 0.4)):  # of a later rank with fewer steps, as many, and more
        rest = {0: {"step": torch.tensor(steps), "mu_product": torch.tensor(product)}}
        average_moments(_Pair(described=(moments, rest), sums={(3,): torch.zeros(3)}), optimizer)
        combined = {name: float(optimizer.state[parameter][name]) for name in local}
        assert combined == pytest.approx({"step": 3.0, "mu_product": 0.4} if steps > 2.0 else local)


def test_the_moments_of_a_single_rank_are_unchanged() -> None:
    parameter, optimizer = stepped()
    average_moments(World(), optimizer)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0] * 3
