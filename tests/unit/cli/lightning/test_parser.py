"""Options of trainers, modules, callbacks and optimizers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

import fabricx as fx
from fabricx.callbacks import EarlyStopping
from fabricx.cli.lightning.parser import LightningArgumentParser
from fabricx.lightning.callbacks import callback_class
from fabricx.testing import TinyModule


def _trainer(words: list[str]) -> Any:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--name", type=str)
    parser.add_lightning_class_args(fx.Trainer, "trainer")
    return parser.instantiate(parser.parse_args(words))


@pytest.mark.parametrize("package", ["", "lightning.pytorch.callbacks.", "pytorch_lightning.callbacks."])
def test_short_names_and_lightnings_paths_are_classes_of_fabricx(package: str) -> None:
    callback_class(LightningEarlyStopping)  # adapted in this process, under the same name
    words = [f"--trainer.callbacks+={package}EarlyStopping", "--trainer.callbacks.monitor=loss"]
    [callback] = _trainer(words).trainer.callbacks
    assert isinstance(callback, EarlyStopping)
    assert callback.monitor == "loss"


def test_lightnings_paths_in_files_are_classes_of_fabricx_and_other_texts_stay(tmp_path: Path) -> None:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--name", type=str)
    parser.add_lightning_class_args(fx.Trainer, "trainer")
    config = tmp_path / "config.yaml"
    config.write_text(
        "name: lightning.pytorch is a package\n"
        "trainer:\n  enable_checkpointing: null\n  callbacks:\n"
        "  - class_path: lightning.pytorch.callbacks.EarlyStopping\n    init_args: {monitor: loss, min_delta: 1e-3}\n"
    )
    values = parser.instantiate(parser.parse_args([f"--config={config}"]))
    assert isinstance(values.trainer.callbacks[0], EarlyStopping)
    assert values.trainer.callbacks[0].min_delta == 0.001  # of a number such as 1e-3, which is a text in YAML 1.1
    assert values.name == "lightning.pytorch is a package"


def test_every_option_of_the_trainer_can_be_null() -> None:
    names = [name for name in inspect.signature(fx.Trainer).parameters if name != "self"]
    values = _trainer([f"--trainer.{name}=null" for name in names]).trainer
    assert all(values[name] is None for name in names)
    fx.Trainer(**values.as_dict())


def test_an_optimizer_is_selected_by_class_or_fixed() -> None:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam))
    parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR)
    values = parser.parse_args(["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler.step_size=3"])
    optimizer = parser.optimizer_groups["optimizer"].with_class(values.optimizer)
    schedule = parser.lr_scheduler_groups["lr_scheduler"].with_class(values.lr_scheduler)
    assert optimizer["class_path"] == "torch.optim.SGD"
    assert optimizer["init_args"]["lr"] == 0.5
    assert schedule["class_path"] == "torch.optim.lr_scheduler.StepLR"
    assert schedule["init_args"]["step_size"] == 3


def test_other_classes_are_refused() -> None:
    parser = LightningArgumentParser()
    with pytest.raises(ValueError, match="cannot add arguments from"):
        parser.add_lightning_class_args(int, "number")
    with pytest.raises(TypeError, match="StepLR is not a Optimizer"):
        parser.add_optimizer_args(torch.optim.lr_scheduler.StepLR)
    with pytest.raises(TypeError, match="SGD is not a LRScheduler or ReduceLROnPlateau"):
        parser.add_lr_scheduler_args((torch.optim.SGD,))
    assert parser.add_lightning_class_args(TinyModule, "model") == ["model.lr"]
