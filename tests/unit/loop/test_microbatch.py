"""`Strategy.forward_backward`: the seam through which a strategy computes a microbatch in several parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.core.strategy import Traits
from fabricx.testing import QUIET, TinyModule, tiny_loader


class InParts(fx.Strategy):
    """Computes each microbatch as two halves of equal size, as a pipeline does."""

    traits = Traits(max_ranks=1)

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        outputs = None
        for half in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            outputs = backward(step(half, index) / 2)
        return outputs


class Counts(fx.Callback):
    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, hook: str) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._count("zero_grad")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._count("backward")


def train(strategy: fx.Strategy, accumulate: int) -> tuple[TinyModule, fx.Trainer, dict[str, int]]:
    module, counts = TinyModule(), Counts()
    trainer = fx.Trainer(
        max_epochs=2, strategy=strategy, callbacks=[counts], accumulate_grad_batches=accumulate, **QUIET
    )
    trainer.fit(module, tiny_loader(16, 4))
    return module, trainer, counts.calls


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_microbatch_may_be_computed_in_parts(accumulate: int) -> None:
    whole, plain, calls = train(fx.plugins.build("strategies", "single"), accumulate)
    halves, parts, calls_of_parts = train(InParts(), accumulate)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)  # different summation order of float32 values
    assert parts.global_step == plain.global_step
    assert calls_of_parts["zero_grad"] == calls["zero_grad"]  # once in a window
    assert calls_of_parts["backward"] == 2 * calls["backward"]
