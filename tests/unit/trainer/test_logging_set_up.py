"""Records that a rank opens for a run, and their content of the run's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.core.logger import Logger
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Recorded(Logger):
    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.hparams: dict[str, Any] = {}

    def open(self, run_dir: Path) -> None: ...

    def log_metrics(self, metrics: Any, step: int) -> None: ...

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        self.texts[name] = text

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        self.hparams.update(params)


class Net(TinyModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("logs", [True, False])
def test_a_fit_records_command_arguments_and_hyperparameters(logs: bool, tmp_path: Path) -> None:
    logger = Recorded()
    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path, "logger": logger}
    trainer = fx.Trainer(max_steps=1, enable_autolog_hparams=logs, **options)
    trainer.fit(Net(width=5), tiny_loader())
    assert trainer.run_dir is not None
    assert (trainer.run_dir / "arguments.yaml").read_text() == logger.texts["arguments"]
    assert "max_steps: 1" in logger.texts["arguments"]
    assert "command" in logger.texts
    assert logger.hparams == ({"lr": 0.1, "width": 5} if logs else {})


def test_a_prediction_and_a_fast_dev_run_open_no_logger(tmp_path: Path) -> None:
    logger = Recorded()
    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path, "logger": logger}
    module = Net()
    fx.Trainer(**options).predict(module, tiny_loader())
    fx.Trainer(fast_dev_run=True, **options).fit(module, tiny_loader())
    assert (logger.texts, logger.hparams, list(tmp_path.iterdir())) == ({}, {}, [])


def test_an_evaluation_adds_its_results_to_the_records_of_a_fit_only(tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path, "logger": Recorded(), "enable_telemetry": True}
    trainer = fx.Trainer(max_steps=1, **options)
    trainer.validate(TinyModule(), tiny_loader(), verbose=False)
    assert list(tmp_path.glob("**/telemetry")) == []
    trainer.fit(TinyModule(), tiny_loader())
    before = {path.name for path in tmp_path.glob("**/telemetry/*")}
    trainer.validate(TinyModule(), tiny_loader(), verbose=False)
    assert {path.name for path in tmp_path.glob("**/telemetry/*")} > before


def test_a_run_without_loggers_and_checkpoints_creates_no_folder(tmp_path: Path) -> None:
    fx.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET).fit(TinyModule(), tiny_loader())
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_checkpoints_have_a_folder_of_their_own_creates_no_other(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}")
    trainer = fx.Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[saver], **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]
    assert not trainer.writes
    assert fx.Trainer(callbacks=[ModelCheckpoint()], **QUIET).writes
    assert fx.Trainer(callbacks=[saver], devices=2, **QUIET).writes
    assert fx.Trainer(callbacks=[saver], profiler="simple", **QUIET).writes  # which reads the records
