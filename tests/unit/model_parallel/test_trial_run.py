"""Comparison of two samples before and after the division of a module."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.model_parallel.trial_run import Measured, measure


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
