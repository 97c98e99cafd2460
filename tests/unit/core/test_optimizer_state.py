"""Optimizer states by names of parameters: they load in another order of groups, never into other parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.core.optimizer_state import by_name, by_number


def stepped(*order: str, lr: float = 0.1) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    layer = nn.Linear(2, 1)
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    parameters = dict(layer.named_parameters())
    optimizer = torch.optim.SGD([{"params": [parameters[name]]} for name in order], lr=lr, momentum=0.9)
    for number, name in enumerate(order):
        parameters[name].grad = torch.full_like(parameters[name], number + 1.0)
    optimizer.step()
    return optimizer, names


def test_a_state_loads_into_groups_in_another_order() -> None:
    optimizer, names = stepped("weight", "bias")
    saved = by_name(optimizer, names)
    assert set(saved["state"]) == {"weight", "bias"}
    swapped, names = stepped("bias", "weight")
    loaded = by_number(swapped, names, saved)
    assert loaded["state"] == {0: saved["state"]["bias"], 1: saved["state"]["weight"]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"class": "Adam"}, "of the checkpoint is Adam, and the module's is SGD"),
        ({"param_groups": [{"params": ["weight"]}]}, "it lacks bias, .* none. Resume with"),
        ({"param_groups": [{"params": ["weight", "bias", "head"]}]}, "has head. If a hook of the module adds them"),
        ({"param_groups": [{"params": ["weight", "bias"]}]}, "other parameter groups than the module's"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(change: dict[str, Any], error: str) -> None:
    optimizer, names = stepped("weight", "bias")
    with pytest.raises(ValueError, match=error):
        by_number(optimizer, names, by_name(optimizer, names) | change)
