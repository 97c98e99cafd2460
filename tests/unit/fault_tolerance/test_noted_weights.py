"""Changes of weights between the point from which work is repeated and its interruption."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.fault_tolerance.noted_weights import NotedWeights


@pytest.mark.parametrize("values", [True, False])
def test_a_change_is_noticed_until_the_next_point(values: bool) -> None:
    layer = nn.Linear(2, 1)
    weights = NotedWeights(layer)
    assert not weights.changed()
    weights.note(values=True)
    weights.note(values=values)
    assert not weights.changed()
    nn.init.zeros_(layer.weight)
    assert weights.changed()
    weights.forget()
    assert not weights.changed()


def test_batches_count_as_the_first_of_an_epoch_if_that_has_written_without_a_version() -> None:
    layer = nn.Linear(2, 1)
    weights = NotedWeights(layer)
    for writes in (True, False):
        weights.note(values=True)
        if writes:
            layer.weight.data.mul_(2)
        weights.before_update()
        nn.init.ones_(layer.weight)  # the update
        weights.forget()
        assert not weights.changed()
        weights.note(values=False)
        assert weights.changed() is writes


@pytest.mark.parametrize("within_window", [True, False])
@pytest.mark.parametrize("gives_back", [True, False])
def test_a_validation_may_exchange_weights_and_give_them_back(within_window: bool, gives_back: bool) -> None:
    layer = nn.Linear(2, 1)
    weights = NotedWeights(layer)
    weights.note(values=True)
    weights.note(values=False)
    if not within_window:
        weights.forget()
    before = layer.weight.detach().clone()
    with weights.in_validation():
        nn.init.zeros_(layer.weight)
        assert weights.changed()
        if gives_back:
            with torch.no_grad():
                layer.weight.copy_(before)
            assert not weights.changed()
    assert weights.changed() is (within_window and not gives_back)
