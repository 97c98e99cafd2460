"""Steps of the module: valid return values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.core.hook_calls.steps import detached, wrap_steps
from fabricx.core.precision import Precision
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


class _Step:
    """A module whose steps have the parametrized signature."""

    automatic_optimization = True

    def __init__(self, step: Any) -> None:
        self.validation_step = step


@pytest.mark.parametrize(
    ("step", "several", "passed"),
    [
        (lambda batch: [batch], False, ["b"]), (lambda batch, i: [batch, i], False, ["b", 3]),
        (lambda *received: list(received), False, ["b", 3]), (lambda *received: list(received), True, ["b", 3, 1]),
        (lambda batch, i, loader: [batch, i, loader], True, ["b", 3, 1]), (lambda batch: [batch], True, ["b"]),
        (lambda batch, i, loader=7: [batch, i, loader], False, ["b", 3, 7]),
    ],
)  # fmt: skip
def test_a_step_may_declare_fewer_arguments_than_the_loop_passes(step: Any, several: bool, passed: list[Any]) -> None:
    steps = wrap_steps(_Step(step), Precision(), several_loaders=several)  # type: ignore[arg-type]
    assert list(steps) == ["validation"]
    arguments = ("b", 3, 1) if several else ("b", 3)
    assert steps["validation"](*arguments) == passed


def test_outputs_for_hooks_have_no_graph_and_other_entries_are_kept() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    outputs = detached({"loss": loss, "ids": [1, 2]})
    assert not outputs["loss"].requires_grad
    assert outputs["ids"] == [1, 2]
    assert detached(None) is None
