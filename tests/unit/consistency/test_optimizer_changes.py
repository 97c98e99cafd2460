"""Uses of optimizers by hooks that would have no effect on servers, or a different effect on several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.consistency.optimizer_changes import (
    KnownParameters,
    cleared_gradients,
    not_watched,
    watched_states,
)


def trained_layer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: list(optimizer.state.values()),
        lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]],
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    ],
)
def test_each_use_of_a_state_is_noted_and_has_its_effect(use: Callable[[Any], Any]) -> None:
    _, optimizer = trained_layer()
    _, other = trained_layer()
    with watched_states([optimizer]) as used:
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.zero_grad()
        assert not used()
        use(optimizer)
        assert used()
    use(other)
    assert len(optimizer.state) == len(other.state)
    assert type(optimizer.state) is type(other.state)


def test_a_checkpoint_saved_by_a_hook_does_not_count_as_a_use_of_the_state() -> None:
    _, optimizer = trained_layer()
    with watched_states([optimizer]) as used:
        with not_watched():
            optimizer.state_dict()
        assert not used()
    assert len(optimizer.state) == 2


def test_a_state_that_is_not_used_stays_the_same_object() -> None:
    _, optimizer = trained_layer()
    state = optimizer.state
    with watched_states([optimizer]):
        optimizer.param_groups[0]["lr"] = 0.2
    assert optimizer.state is state
    assert len(state) == 2


@pytest.mark.parametrize("servers_step", [True, False])
def test_an_optimizer_zero_grad_that_keeps_gradients_is_refused(servers_step: bool) -> None:
    layer, optimizer = trained_layer()
    with cleared_gradients(optimizer, servers_step=servers_step):
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in layer.parameters())
    with pytest.raises(ValueError, match="keeps gradients"), cleared_gradients(optimizer, servers_step=servers_step):
        pass
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_gradients_of_zero_are_refused_only_where_servers_skip_their_parameters() -> None:
    layer, optimizer = trained_layer()
    with cleared_gradients(optimizer, servers_step=False):
        optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())
    with (
        pytest.raises(ValueError, match="sets gradients to zero"),
        cleared_gradients(optimizer, servers_step=True),
    ):
        optimizer.zero_grad(set_to_none=False)


def test_optimizers_train_parameters_of_the_set_up_only() -> None:
    layer, optimizer = trained_layer()
    known = KnownParameters(layer, [optimizer])
    known.check(layer, [optimizer], "DDP")
    layer.bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer.add_param_group({"params": [layer.bias]})
    known.check(layer, [optimizer], "DDP")  # it isn't trained
    layer.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"bias was created or replaced after set-up, and DDP exchanges"):
        known.check(layer, [optimizer], "DDP")
