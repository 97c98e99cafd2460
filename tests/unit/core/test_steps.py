"""Steps of the module: what they may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m: torch.ones(2, requires_grad=True), r"shape \(2,\)"),
        (lambda m: torch.ones(()), "without a gradient"),
        (lambda m: "high", "returned str"),
        (lambda m: {"los": 1}, r"without 'loss' \(\['los'\]\)"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_explained(loss: Any, message: str, quiet: dict[str, Any]) -> None:
    class Wrong(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss(self)

    with pytest.raises(ValueError, match=message):
        fx.Trainer(max_epochs=1, **quiet).fit(Wrong(), tiny_loader())
