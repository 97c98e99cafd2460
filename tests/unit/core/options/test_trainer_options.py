"""Validation of the Trainer's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.core.options.trainer_options import TrainerOptions
from fabricx.testing import QUIET, TinyModule, tiny_loader


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 1.5}, "val_check_interval=1.5: set a fraction of an epoch"),
        ({"val_check_interval": 0}, "val_check_interval=0: "),
        (
            {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
            "val_check_interval=0.5 is a fraction of an epoch: set a number of batches",
        ),
        ({"val_check_interval": -3}, "val_check_interval=-3: "),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2: set an integer number of batches, -1 or more"),
        ({"num_sanity_val_steps": True}, "num_sanity_val_steps=True: set an integer number of batches"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1: "),
        ({"deterministic": 1}, "deterministic=1: set False, True, 'warn' or 'elastic'"),
        ({"deterministic": 0}, "deterministic=0: "),
        ({"gradient_clip_val": "low"}, "gradient_clip_val='low': set a limit of 0 or more"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan: "),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1: "),
    ],
)
def test_an_invalid_value_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fx.Trainer(**options, **QUIET)


@pytest.mark.parametrize(
    ("options", "epochs", "steps"),
    [
        ({}, None, -1), ({"max_steps": 5}, None, 5), ({"max_time": "1h"}, None, -1), ({"max_epochs": 3}, 3, -1),
        ({"max_epochs": -1}, -1, -1), ({"max_epochs": 2, "max_steps": 5}, 2, 5), ({"max_epochs": "2ep"}, 2, -1),
        ({"max_steps": "5st"}, None, 5), ({"max_epochs": 0}, 0, -1), ({"fast_dev_run": 3, "max_epochs": 9}, 1, 3),
    ],
    ids=str,
)  # fmt: skip
def test_limits_are_the_passed_values(options: dict[str, Any], epochs: int | None, steps: int) -> None:
    trainer_options = TrainerOptions(**options)
    assert (trainer_options.max_epochs, trainer_options.max_steps) == (epochs, steps)


def test_a_fast_run_limits_each_loader_and_writes_nothing() -> None:
    trainer_options = TrainerOptions(
        fast_dev_run=True, limit_val_batches=0.5, check_val_every_n_epoch=5, val_check_interval=7
    )
    assert (
        trainer_options.limit_train_batches
        == trainer_options.limit_val_batches
        == trainer_options.limit_test_batches
        == 1
    )
    assert (
        trainer_options.num_sanity_val_steps,
        trainer_options.check_val_every_n_epoch,
        trainer_options.val_check_interval,
    ) == (0, 1, 1.0)
    assert not trainer_options.enable_checkpointing
    assert not trainer_options.enable_telemetry


def test_an_unknown_accelerator_or_a_url_as_root_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="Did you mean 'cuda'"):
        TrainerOptions(accelerator="cdua")
    with pytest.raises(ValueError, match=r"to write checkpoints to a URL, set ModelCheckpoint\(dirpath="):
        TrainerOptions(default_root_dir="s3://bucket/runs")
    assert TrainerOptions(default_root_dir="~/runs").default_root_dir == str(Path.home() / "runs")


def test_strings_are_not_flags_and_schedules_are_not_numbers() -> None:
    with pytest.raises(ValueError, match="enable_progress_bar='no': set True or False"):
        TrainerOptions(enable_progress_bar="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass GradientAccumulationScheduler\(\{0: 2\}\)"):
        TrainerOptions(accumulate_grad_batches={0: 2})  # type: ignore[arg-type]


def test_values_that_lightning_s_trainer_has_before_a_fit() -> None:
    endless = fx.Trainer(**QUIET)
    with pytest.raises(TypeError, match="has no data"):
        endless.fit(TinyModule())
    assert endless.max_epochs == 1000
    trainer = fx.Trainer(num_sanity_val_steps=-1, max_steps=1, **QUIET)
    assert trainer.max_epochs is None
    assert trainer.gradient_clip_algorithm is None
    assert trainer.num_sanity_val_steps == float("inf")
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.max_epochs == -1
