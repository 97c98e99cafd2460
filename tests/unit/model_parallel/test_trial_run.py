"""Comparison of two samples before and after the division of a module."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx.core.trial import Trial
from fabricx.model_parallel.trial_run import Measured, gradients_in_parts, measure


def test_gradients_are_measured_and_removed() -> None:
    layer = nn.Linear(2, 1, bias=False)

    def compute() -> float:
        loss = layer(torch.tensor([[3.0, 4.0]])).sum()
        loss.backward()
        return float(loss.detach())

    norm = lambda parameters: nn.utils.get_total_norm([p.grad for p in parameters])  # noqa: E731
    found = measure(compute, layer.parameters(), norm, [torch.float32])
    assert found.norm == 5.0
    assert layer.weight.grad is None


def test_a_factor_is_a_difference_and_rounding_is_not() -> None:
    before = Measured(1.0, 2.0, 1e-3)
    assert not before.differs(Measured(1.0005, 2.001, 1e-3))
    assert before.differs(Measured(1.0, 4.0, 1e-3))
    assert before.differs(Measured(1.1, 2.0, 1e-3))
    assert before.differs(Measured(1.0, float("nan"), 1e-3))


LAYER = nn.Linear(3, 3, dtype=torch.float64)
INPUTS = torch.tensor([[0.0, 1.0, 2.0], [1.0, -1.0, 4.0]], dtype=torch.float64)
TARGETS = torch.tensor([[0, 1], [2, -100]])


def of_tokens(batch: Any, index: int) -> Tensor:
    """Return a mean over two tokens of the first sample, and one of the second."""
    logits = LAYER(batch[0]).unsqueeze(-1).expand(-1, -1, 2)
    return F.cross_entropy(logits, batch[1])


def of_pairs(batch: Any, index: int) -> Tensor:
    outputs = LAYER(batch[0])
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


STEPS = {
    "mean over samples": (lambda batch, index: LAYER(batch[0]).square().mean(), None, False),
    "mean over tokens": (of_tokens, None, True),
    "weighted mean over tokens": (of_tokens, lambda batch: float((batch[1] != -100).sum()), False),
    "sum": (lambda batch, index: LAYER(batch[0]).square().sum(), None, True),
    "contrast of samples": (of_pairs, None, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_loss_that_is_no_mean_over_samples_differs_in_parts(name: str) -> None:
    step, weight, differs = STEPS[name]
    trial = Trial(step, (INPUTS, TARGETS), contextlib.nullcontext, 2, 2, weight)
    whole = trial.run()
    whole.backward()
    gradient, LAYER.weight.grad = LAYER.weight.grad, None
    loss = gradients_in_parts(trial)
    assert (not math.isclose(loss, float(whole.detach()), rel_tol=1e-9)) is differs
    assert (not torch.allclose(LAYER.weight.grad, gradient)) is differs
    LAYER.zero_grad()


def test_a_step_that_draws_random_numbers_or_needs_both_samples_is_not_compared_in_parts() -> None:
    def noise(batch: Any, index: int) -> Tensor:
        return (LAYER(batch[0]) - torch.randn(len(batch[0]), 3)).square().mean()

    def both(batch: Any, index: int) -> Tensor:
        return (LAYER(batch[0])[1] - 1.0).square().mean()

    for step in (noise, both):
        assert math.isnan(gradients_in_parts(Trial(step, (INPUTS, TARGETS), contextlib.nullcontext)))
