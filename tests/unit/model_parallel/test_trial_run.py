"""Comparison of two samples before and after the division of a module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx.core.module_state.rng import random_kept
from fabricx.core.strategy_support.trial import Trial
from fabricx.model_parallel.batch_draws import DifferentDraws
from fabricx.model_parallel.trial_run import Measured, gradients_in_parts, measure


def test_gradients_are_measured_and_removed() -> None:
    layer = nn.Linear(2, 1, bias=False)

    def compute() -> float:
        loss = layer(torch.tensor([[3.0, 4.0]])).sum()
        loss.backward()
        return float(loss.detach())

    norm = lambda parameters: nn.utils.get_total_norm([p.grad for p in parameters])  # noqa: E731
    measured = measure(compute, layer.parameters(), norm, [torch.float32])
    assert measured.norm == 5.0
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
    """Return the mean over two tokens of the first sample, and over a single token of the second."""
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


def compared(step: Any, weight: Any = None) -> bool:
    """Return whether the gradients of a batch differ from the gradients of its parts."""
    trial = Trial(step, (INPUTS, TARGETS), random_kept, 2, 2, weight)
    norm = lambda parameters: nn.utils.get_total_norm([p.grad for p in parameters])  # noqa: E731
    together, apart = (
        measure(part, LAYER.parameters(), norm, [torch.float64]) for part in gradients_in_parts(trial, trial.batch)
    )
    return apart.differs(together)


@pytest.mark.parametrize("name", STEPS)
def test_a_loss_that_is_not_a_mean_over_samples_differs_on_parts_of_a_batch(name: str) -> None:
    step, weight, differs = STEPS[name]
    assert compared(step, weight) is differs


def masked(batch: Any, share: float) -> tuple[Tensor, Tensor]:
    noise = torch.randn(len(batch[0]), 3, dtype=torch.float64)
    return (LAYER(batch[0] + noise) - noise).square(), torch.rand(len(batch[0]), 3) < share


RANDOM = {
    "noise": (lambda batch, index: masked(batch, 0.5)[0].mean(), False),
    "dropout of words": (lambda batch, index: F.dropout(LAYER(batch[0]), 0.5).square().mean(), False),
    "mean over masked elements": (lambda batch, index: torch.masked_select(*masked(batch, 0.7)).mean(), True),
    "a number for the batch": (lambda batch, index: LAYER(batch[0]).mean() * np.random.rand() * torch.rand(()), False),
    "order of features": (lambda batch, index: (LAYER(batch[0]) * torch.randperm(3)).square().mean(), False),
}


@pytest.mark.parametrize("name", RANDOM)
def test_samples_have_equal_random_numbers_in_a_batch_and_in_its_parts(name: str) -> None:
    step, differs = RANDOM[name]
    torch.manual_seed(2)  # different numbers of masked elements
    assert compared(step) is differs


def test_random_numbers_without_a_sample_dim_and_steps_over_several_samples_are_errors() -> None:
    steps: dict[str, Any] = {
        "in another way": lambda batch, index: LAYER(batch[0])[torch.randperm(len(batch[0]))].mean(),
        "NumPy depend on the number": lambda batch, index: LAYER(batch[0]).mean() * np.random.rand(len(batch[0])).sum(),
        "more random numbers": lambda batch, index: sum(LAYER(row).mean() * torch.rand(()) for row in batch[0]) / 2,
        "out of bounds": lambda batch, index: (LAYER(batch[0])[1] - 1.0).square().mean(),
    }
    for message, step in steps.items():
        with pytest.raises((DifferentDraws, IndexError), match=message):
            compared(step)
    assert all(parameter.grad is None for parameter in LAYER.parameters())
