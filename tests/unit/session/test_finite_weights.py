"""Warnings of weights that are not finite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx.session.finite_weights import first_nonfinite
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Diverges(TinyModule):
    def __init__(self, factor: float, *, manual: bool = False) -> None:
        super().__init__()
        self.factor, self.automatic_optimization = factor, not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx) * self.factor
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.parametrize(("factor", "manual"), [(float("nan"), False), (float("inf"), True)])
def test_one_warning_in_a_run_names_the_weight_and_the_remedy(factor: float, manual: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fx.Trainer(max_epochs=3, **QUIET).fit(Diverges(factor, manual=manual), tiny_loader())
    texts = [str(warning.message) for warning in caught if "NaN or infinite" in str(warning.message)]
    assert len(texts) == 1
    assert texts[0].startswith("the weight layer.weight is NaN or infinite at the end of epoch 0")
    assert "detect_anomaly=True" in texts[0]


def test_weights_of_other_stages_of_a_pipeline_are_not_read() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.data = torch.full((), float("nan")).expand(2, 2)
    assert first_nonfinite(layer) is None
    layer.bias.data[0] = float("nan")
    assert first_nonfinite(layer) == "bias"


def test_frozen_and_lazy_weights_are_not_read() -> None:
    class Frozen(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)
            self.later = torch.nn.LazyLinear(1)

    fx.Trainer(max_epochs=1, **QUIET).fit(Frozen(), tiny_loader())  # a warning is an error
