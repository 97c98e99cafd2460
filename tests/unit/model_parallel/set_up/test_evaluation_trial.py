"""Values of a validation step before and after a division."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from fabricx.core.strategy_support.trial import Trial, Validation
from fabricx.model_parallel.set_up.evaluation_trial import Evaluated, check_evaluated, evaluate_whole
from fabricx.model_parallel.trial import StepChanged


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen = MeanMetric(), None
        self.log = lambda name, value: None

    def begin(self) -> None:
        self.seen: Any = []

    def step(self, batch: Tensor, index: int, loader: int) -> Any:
        self.seen.append(index)
        self.log("sum", batch.sum() + loader)
        self.mean.update(batch)
        return {"outputs": batch, "predicted": batch.argmax()}


def validation(shared: Any = ()) -> Validation:
    model = Model()
    return Validation(model, model.step, model.begin, [(torch.ones(3), 0, 0), (torch.ones(2), 0, 1)])


def trial(loaders: Any = validation) -> Trial:
    return Trial(lambda batch, index: None, None, nullcontext, validation=loaders)


def test_outputs_logged_values_and_metrics_of_all_loaders_are_recorded_after_the_hooks_that_the_step_needs() -> None:
    records = evaluate_whole(trial())
    assert isinstance(records, Evaluated)
    assert records.begins
    logged = {name: values[0] for name, values in records.values.items() if "logged" in name}
    assert logged == {"the logged 'sum'": 3.0, "the logged 'sum' (2)": 3.0}
    assert {"the output['outputs']", "the output for loader 1['outputs']"} <= records.values.keys()
    assert any(name.startswith("the state of mean") for name in records.values)
    assert not any("predicted" in name for name in records.values)  # equal values may be in a different order


def test_differences_are_named_and_rounding_is_no_difference() -> None:
    before = evaluate_whole(trial())
    assert isinstance(before, Evaluated)

    def compared(change: Any, *, complete: bool = True) -> str:
        again = validation()
        step = lambda batch, *args: again.step(change(batch), *args)  # noqa: E731
        return check_evaluated(trial(), again, step, before, 1e-3, complete=complete)

    assert compared(lambda batch: batch * (1 + 1e-6)) == ""
    assert compared(lambda batch: batch * 2).startswith("the logged 'sum' has the norm 6, but 3 in one process")
    assert compared(lambda batch: batch * 2, complete=False) == ""
    with pytest.raises(StepChanged, match="validation_step fails in the divided module"):
        compared(lambda batch: 1 / 0)


@pytest.mark.parametrize("other", [-torch.inf, torch.inf, torch.nan, torch.finfo(torch.float32).min])
def test_infinite_elements_and_masks_are_compared_by_position(other: float) -> None:
    """Such as logits with a mask, and the state of a MaxMetric that was not updated."""

    def mask(values: list[float]) -> Any:
        again = validation()
        return again._replace(step=lambda batch, *args: {"logits": torch.tensor(values)})

    before = evaluate_whole(trial(lambda shared: mask([1.0, other, 3.0])))
    assert isinstance(before, Evaluated)
    for values, same in (([1.0, other, 3.0], True), ([2.0, other, 3.0], False), ([1.0, 0.0, 3.0], False),
                         ([other, 1.0, 3.0], False)):  # fmt: skip
        again = mask(values)
        assert (check_evaluated(trial(), again, again.step, before, 1e-3, complete=True) == "") is same, values


def test_a_step_that_cannot_be_tried_has_a_reason() -> None:
    assert evaluate_whole(trial(lambda shared: None)) is None
    broken = lambda shared: validation()._replace(step=lambda *args: 1 / 0)  # noqa: E731
    assert evaluate_whole(trial(broken)) == "ZeroDivisionError: division by zero"
