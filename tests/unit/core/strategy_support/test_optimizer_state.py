"""Optimizer states are keyed by parameter name: they load into groups in any order, never into wrong parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.core.strategy_support.optimizer_state import added_once, by_name, by_number, let_groups_grow

Parameters = dict[str, nn.Parameter]


def stepped(*order: str, lr: float = 0.1) -> tuple[torch.optim.Optimizer, Parameters]:
    parameters = dict(nn.Linear(2, 1).named_parameters())
    optimizer = torch.optim.SGD([{"params": [parameters[name]]} for name in order], lr=lr, momentum=0.9)
    for number, name in enumerate(order):
        parameters[name].grad = torch.full_like(parameters[name], number + 1.0)
    optimizer.step()
    return optimizer, parameters


def saved_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    return by_name(optimizer, {id(parameter): name for name, parameter in parameters.items()})


def test_a_state_loads_into_groups_in_another_order() -> None:
    saved = saved_of(*stepped("weight", "bias"))
    assert set(saved["state"]) == {"weight", "bias"}
    loaded = by_number(*stepped("bias", "weight"), saved)
    assert loaded["state"] == {0: saved["state"]["bias"], 1: saved["state"]["weight"]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"class": "Adam"}, "of the checkpoint is Adam, and the module's is SGD"),
        ({"param_groups": [{"params": ["weight"]}]}, "it lacks bias, .* none. Resume with"),
        ({"param_groups": [{"params": ["weight", "bias", "head"]}]}, "has head. Resume with"),
        ({"param_groups": [{"params": ["weight", "bias"]}]}, "other parameter groups than the module's"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(change: dict[str, Any], error: str) -> None:
    optimizer, parameters = stepped("weight", "bias")
    with pytest.raises(ValueError, match=error):
        by_number(optimizer, parameters, saved_of(optimizer, parameters) | change)


def test_groups_that_hooks_have_added_are_part_of_a_state() -> None:
    (first, parameters), (second, others) = stepped("weight"), stepped("weight")
    let_groups_grow(first)
    before = saved_of(first, parameters)
    first.add_param_group({"params": [parameters["bias"]], "lr": 0.5})
    after = saved_of(first, parameters)
    with pytest.raises(ValueError, match="additionally has bias"):  # training has not begun
        by_number(second, others, after)
    let_groups_grow(second)
    others["bias"].requires_grad_(False)
    second.load_state_dict(by_number(second, others, after))
    assert [group["lr"] for group in second.param_groups] == [0.1, 0.5]
    assert others["bias"].requires_grad
    with added_once([second]):
        second.add_param_group({"params": iter([others["bias"]])})
    assert len(second.param_groups) == 2
    second.load_state_dict(by_number(second, others, before))
    assert len(second.param_groups) == 1
    assert others["bias"].requires_grad, "only a callback that unfreezes parameters freezes them again"
    with added_once([second]):
        second.add_param_group({"params": others["bias"]})
    assert len(second.param_groups) == 2


def test_groups_of_a_different_configuration_are_not_groups_added_by_hooks() -> None:
    (more, parameters), (fewer, others) = stepped("weight", "bias"), stepped("weight")
    let_groups_grow(more)
    let_groups_grow(fewer)
    with pytest.raises(ValueError, match="additionally has bias"):
        by_number(fewer, others, saved_of(more, parameters))
