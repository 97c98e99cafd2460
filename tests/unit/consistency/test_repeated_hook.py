"""What a hook changes that is called again is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.consistency.repeated_hook import GroupOptions, RepeatedHook


class Layer(nn.Linear):
    mean: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def trained_layer() -> tuple[Layer, torch.optim.Optimizer]:
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer, _: layer.reset_parameters(), "weight and 1 more"),
        (lambda layer, _: layer.weight.data.mul_(0.5), "weight"),
        (lambda layer, _: layer.mean.add_(1), "mean"),
        (lambda _, optimizer: optimizer.state.clear(), "the state of SGD"),
        (lambda _, optimizer: optimizer.state["new"].update(steps=1), "the state of SGD"),
        (lambda layer, optimizer: optimizer.state[layer.bias]["momentum_buffer"].mul_(0.5), "the state of SGD"),
        (lambda layer, optimizer: optimizer.state[layer.bias].clear(), "the state of SGD"),
        (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5), "options of SGD"),
        (lambda _, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.5)), "options of SGD"),
        (lambda *_: None, ""),
    ],
)
def test_changes_of_a_hook_that_is_called_again_are_undone_and_named(
    change: Callable[[Any, Any], Any], name: str
) -> None:
    layer, optimizer = trained_layer()
    weights, state = copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict())
    hook = RepeatedHook(layer, [optimizer])
    change(layer, optimizer)
    assert hook.undo() == name
    torch.testing.assert_close(layer.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert hook.undo() == ""


def test_an_option_that_is_a_tensor_keeps_its_object() -> None:
    layer = Layer()
    optimizer = torch.optim.Adam(layer.parameters(), lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    hook = RepeatedHook(layer, [optimizer])
    rate.mul_(0.5)
    assert hook.undo() == "options of Adam"
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == torch.tensor(0.1).item()


def test_other_changes_stay() -> None:
    layer, optimizer = trained_layer()
    hook = RepeatedHook(layer, [optimizer])
    layer.requires_grad_(False)
    layer.mask.zero_()
    layer.register_parameter("added", nn.Parameter(torch.ones(1)))
    assert hook.undo() == ""
    assert not layer.weight.requires_grad
    assert not layer.mask.any()


def test_groups_that_the_hook_adds_are_removed() -> None:
    """A hook may add them by a condition on the step, which holds in the middle of the epoch only."""
    layer, optimizer = trained_layer()
    hook = RepeatedHook(layer, [optimizer])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert hook.undo() == f"parameter groups of {type(optimizer).__name__}"
    assert len(optimizer.param_groups) == 1


def test_options_of_groups_are_restored_together() -> None:
    layer = Layer()
    optimizer = torch.optim.SGD([{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}])
    options = GroupOptions(optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert options.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.5]
    assert not options.restore()
    options.remove_added()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
