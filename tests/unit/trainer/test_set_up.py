"""Callbacks of the module in a run, and the stage that hooks receive."""

from __future__ import annotations

from typing import Any

import fabricx as fx
from fabricx.callbacks import EarlyStopping, Timer
from fabricx.core.state import TrainerFn
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Patient(EarlyStopping):  # type: ignore[misc]
    pass


class ConfiguresCallbacks(TinyModule):
    stages: list[Any]

    def configure_callbacks(self) -> Any:
        return [Patient("train_loss", patience=9), Patient("train_loss", patience=8)]

    def setup(self, stage: str) -> None:
        self.stages = [stage]

    def teardown(self, stage: str) -> None:
        self.stages.append(stage)


def test_callbacks_of_the_module_replace_those_of_their_base_class() -> None:
    timer, common = Timer(), fx.Callback()
    trainer = fx.Trainer(max_epochs=1, callbacks=[EarlyStopping("train_loss"), timer, common], **QUIET)
    module = ConfiguresCallbacks()
    trainer.validate(module, tiny_loader())
    stopping = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]
    assert [callback.patience for callback in stopping] == [9, 8]
    assert timer in trainer.callbacks
    assert common in trainer.callbacks
    assert [type(stage) for stage in module.stages] == [TrainerFn] * 2  # has `value`, and equals its text
    assert module.stages == ["validate"] * 2
