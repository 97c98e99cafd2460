"""Types of command lines in annotations."""

from __future__ import annotations

import typing

from torch import nn, optim

from fabricx.lightning import schedules


def test_types_of_the_command_line_can_be_annotations() -> None:
    assert typing.get_args(schedules.OptimizerCallable)[-1] is optim.Optimizer
    assert typing.get_args(schedules.LRSchedulerCallable)[-1] == schedules.LRSchedulerTypeUnion
    assert typing.get_args(schedules.LRSchedulerType)[1] == type[schedules.ReduceLROnPlateau]
    plateau = schedules.ReduceLROnPlateau(optim.Adam(nn.Linear(1, 1).parameters()), "val_loss", patience=3)
    assert (plateau.monitor, plateau.patience) == ("val_loss", 3)
    assert isinstance(plateau, schedules.LRSchedulerTypeTuple)
