"""The loss among the outputs of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricx.core.hook_calls.loss import checked_loss, loss_of


def test_a_loss_of_one_element_is_a_number() -> None:
    loss = torch.ones((1, 1), requires_grad=True)
    assert checked_loss(loss).shape == ()


@pytest.mark.parametrize("outputs", [None, {"other": 1.0}, torch.ones(2, requires_grad=True), torch.ones(())])
def test_outputs_without_a_loss_are_an_error(outputs: Any) -> None:
    with pytest.raises(ValueError, match="training_step returned"):
        loss_of(outputs)


def test_the_loss_is_the_output_or_an_entry_of_it() -> None:
    loss = torch.ones((), requires_grad=True)
    assert loss_of(loss) is not None
    assert torch.equal(loss_of({"loss": loss, "n": 3}), loss)
