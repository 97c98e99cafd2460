"""Sums of gradients as integers: the order changes no bit, and what can't be summed is an error."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fabricx.distributed.world import World
from fabricx.strategies.reproducible import HEADROOM, IntegerSums

PARTS = 12


def summed(sums: IntegerSums, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        sums.add()
        assert parameter.grad is None
    sums.join(World())
    assert parameter.grad is not None
    return parameter.grad


def test_the_order_changes_no_bit_and_the_sum_is_right() -> None:
    parameter = nn.Parameter(torch.zeros(500))
    size = torch.logspace(-12, 3, 500)
    for seed in range(5):
        random.seed(seed)
        gradients = [
            torch.randn(500, generator=torch.Generator().manual_seed(100 * seed + n)) * size for n in range(PARTS)
        ]
        found = []
        for _ in range(3):
            random.shuffle(gradients)
            sums = IntegerSums([parameter], PARTS)
            sums.exponents.fill_(12)
            found.append(summed(sums, parameter, gradients))
            parameter.grad = None
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        exact = torch.stack(gradients).double().sum(0)
        bound = 2.0 ** (12 + HEADROOM + 4 - 62) * PARTS
        assert bool(((found[0].double() - exact).abs() <= bound + exact.abs() * 2.0**-24).all())


def test_the_grid_follows_the_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    sums = IntegerSums([parameter], PARTS)
    for step in range(10):
        size = 2.0 ** (-12 * step)
        found = summed(sums, parameter, [torch.tensor([size, size * 2.0**-20])] * PARTS)
        assert found.tolist() == [PARTS * size, PARTS * size * 2.0**-20]


def test_a_gradient_that_has_grown_too_much_is_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    sums = IntegerSums([parameter], PARTS)
    assert summed(sums, parameter, [torch.full((2,), 2.0**HEADROOM)])[0] == 2.0**HEADROOM
    sums.exponents.zero_()
    with pytest.raises(FloatingPointError, match="can't be summed exactly"):
        summed(sums, parameter, [torch.full((2,), 2.0 ** (HEADROOM + 1))])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_isn_t_finite_isn_t_afterwards(bad: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    sums = IntegerSums(parameters, PARTS)
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, bad]), torch.ones(2)
    sums.add()
    sums.join(World())
    assert bool(parameters[0].grad.isnan().all())
    assert parameters[1].grad.tolist() == [1.0, 1.0]
    assert parameters[2].grad is None  # nobody had one
