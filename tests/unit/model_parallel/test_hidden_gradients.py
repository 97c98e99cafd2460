"""Gradients of which a rank has only a shard, and hooks that read them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.model_parallel.hidden_gradients import DividedGradient, HiddenGradients


def weight() -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = torch.full((2,), 3.0)
    return made


def test_hooks_cannot_read_or_change_a_part_and_the_strategy_can() -> None:
    divided, whole, hidden = weight(), weight(), HiddenGradients()
    gradient = divided.grad
    with hidden.hide([divided, nn.Parameter(torch.ones(1))]):
        assert divided.grad is not None
        assert whole.grad is not None
        with pytest.raises(DividedGradient, match="set gradient_clip_val or call"):
            divided.grad.norm()
        with pytest.raises(DividedGradient):
            divided.grad.mul_(2.0)
        with pytest.raises(DividedGradient):
            nn.utils.clip_grad_norm_([divided], 1.0)
        assert float(whole.grad.sum()) == 6.0
        with hidden.shown():
            divided.grad.mul_(2.0)
        with pytest.raises(DividedGradient):
            divided.grad.sum()
    assert divided.grad is gradient
    assert gradient is not None
    assert gradient.tolist() == [6.0, 6.0]


def test_a_gradient_held_only_by_other_ranks_is_an_error_instead_of_none() -> None:
    absent, hidden = nn.Parameter(torch.ones(2)), HiddenGradients()
    with hidden.hide([weight(), absent], elsewhere=[absent]):
        assert absent.grad is not None
        with pytest.raises(DividedGradient):
            absent.grad.mul_(2.0)
        with hidden.shown():
            assert absent.grad is None
    assert absent.grad is None


def test_a_gradient_removed_by_a_hook_stays_removed() -> None:
    divided, hidden = weight(), HiddenGradients()
    with hidden.hide([divided]):
        divided.grad = None
    assert divided.grad is None
