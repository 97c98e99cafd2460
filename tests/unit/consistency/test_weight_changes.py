"""All kinds of changes of parameters are detected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fabricx.consistency.weight_changes import WeightChanges, digest


def set_memory(weight: Tensor) -> None:
    with torch.no_grad():
        weight.set_(weight * 1.0)


def assign(weight: Tensor) -> None:
    weight.data = weight.data.clone()


def write(weight: Tensor) -> None:
    weight.data.mul_(2.0)


@pytest.mark.parametrize("change", [set_memory, assign, write])
def test_a_changed_weight_is_found_by_its_position(change: Callable[[Tensor], None]) -> None:
    parameters = [nn.Parameter(torch.ones(rows, 2)) for rows in (1, 3, 4)]
    for values in (True, False):
        changes = WeightChanges(parameters, values=values)
        assert changes.first(parameters) is None
        change(parameters[1])
        seen = values or change is not write  # torch counts no version for writes to `.data`
        assert changes.first(parameters) == (1 if seen else None)


def test_a_new_parameter_with_equal_values_is_a_change() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert WeightChanges([weight], values=True).first([nn.Parameter(weight.detach())]) == 0


def test_reads_and_gradients_are_not_changes() -> None:
    layer = nn.Linear(100, 90)
    changes = WeightChanges(layer.parameters(), values=True)
    layer(torch.ones(100)).sum().backward()
    layer.weight.requires_grad_(False)
    assert changes.first(layer.parameters()) is None
    assert digest([]).numel() == 0
