"""Folders of loggers at Lightning's path."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import loggers

import fabricx as fx
from fabricx.loggers import lightning_logs


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_the_logger_at_lightning_s_path_has_lightning_s_folder(name: str, own_folder: Any) -> None:
    cls, theirs = getattr(lightning_logs, name), getattr(loggers, name)
    for options in ({}, {"name": "mine", "version": 3}, {"name": ""}):
        logger, reference = cls(own_folder / "a", **options), theirs(own_folder / "b", **options)
        assert logger.name == reference.name
        paths = [str(path).rstrip("/").replace(str(own_folder / "b"), str(own_folder / "a")) for path in (
            logger.log_dir, reference.log_dir, logger.root_dir, reference.root_dir)]  # fmt: skip
        assert paths[::2] == paths[1::2]
        logger.close()
    in_run = cls()
    in_run.open(own_folder)
    assert in_run.log_dir == str(own_folder)
    in_run.close()
    assert (own_folder / "hparams.yaml").read_text() == "{}\n"  # as there are no hyperparameters


def test_the_default_logger_is_an_instance_of_lightning_s_class() -> None:
    trainer = fx.Trainer(accelerator="cpu")
    assert isinstance(trainer.logger, lightning_logs.TensorBoardLogger)
    assert not isinstance(trainer.logger, lightning_logs.CSVLogger)

    class CustomLogger(lightning_logs.TensorBoardLogger):
        pass

    assert isinstance(CustomLogger(), lightning_logs.TensorBoardLogger)
    assert not isinstance(trainer.logger, CustomLogger)
