"""Division of a module on a mesh of a single rank; `process/test_mesh.py` and `test_context.py` have several."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from fabricx.core.strategy_support.trial import Trial
from fabricx.distributed.world import World
from fabricx.model_parallel.set_up.divided import Settings
from fabricx.model_parallel.set_up.divider import divide

SETTINGS = Settings("mesh", {}, False, 1, "all_gather", "auto", None, "1f1b", 1, "auto", half=False)


def test_without_axes_nothing_is_divided_and_the_norm_is_equal_to_torchs() -> None:
    module = nn.Linear(3, 2)

    def step(batch: Tensor, index: int) -> Tensor:
        return module(batch).sum()  # type: ignore[no-any-return]

    before = {name: value.clone() for name, value in module.state_dict().items()}
    divided = divide(SETTINGS, World(), module, Trial(step, torch.ones(2, 3), contextlib.nullcontext), {})
    assert (divided.tensor, divided.context, divided.pipeline, divided.layout) == (None, None, None, {})
    assert divided.sharded(step) is step
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    step(torch.ones(2, 3), 0).backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert float(divided.norm(module.parameters())) == pytest.approx(float(nn.utils.get_total_norm(gradients)))
    assert divided.division.absent == frozenset()
