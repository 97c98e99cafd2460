"""Types of Lightning's hooks, which annotations of users name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fabricx.lightning import types

theirs: Any = pytest.importorskip("lightning.pytorch.utilities.types")


def test_each_public_type_of_lightning_exists() -> None:
    elsewhere = {"DistributedDataParallel", "LRSchedulerConfig"}  # torch's; `fabricx.core.optimizers.Schedule`
    names = {
        name for name, value in vars(theirs).items()
        if not name.startswith("_") and (inspect.getmodule(value) in (theirs, None) or "SchedulerType" in name)
        and name.lower() != name
    }  # fmt: skip
    missing = {name for name in names if not hasattr(types, name)} - elsewhere
    assert missing <= {"Any", "Union", "Optional", "Protocol", "TypedDict", "Required", "NotRequired"}


def test_a_scheduler_is_recognised_by_its_classes() -> None:
    from torch import nn, optim

    optimizer = optim.SGD([nn.Parameter(nn.Linear(1, 1).weight)], lr=0.1)
    assert isinstance(optim.lr_scheduler.StepLR(optimizer, 1), types.LRSchedulerTypeTuple)
    assert isinstance(optim.lr_scheduler.ReduceLROnPlateau(optimizer), types.LRSchedulerTypeUnion)
