"""Validation of the Trainer's options."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
from omegaconf import ListConfig

import fabricx as fx
from fabricx.core.options import TrainerOptions, check_devices, check_limit, check_max_time
from fabricx.testing import QUIET


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"val_check_interval": 1.5}, "val_check_interval=1.5: set a fraction of an epoch"),
        ({"val_check_interval": 0}, "val_check_interval=0: "),
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
def test_an_invalid_value_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fx.Trainer(**options, **QUIET)


@pytest.mark.parametrize(
    ("options", "epochs", "steps"),
    [
        ({}, 1000, -1), ({"max_steps": 5}, -1, 5), ({"max_time": "1h"}, -1, -1), ({"max_epochs": 3}, 3, -1),
        ({"max_epochs": -1}, -1, -1), ({"max_epochs": 2, "max_steps": 5}, 2, 5), ({"max_epochs": "2ep"}, 2, -1),
        ({"max_steps": "5st"}, -1, 5), ({"max_epochs": 0}, 0, -1), ({"fast_dev_run": 3, "max_epochs": 9}, 1, 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_without_any_limit_ends_after_1000_epochs(options: dict[str, Any], epochs: int, steps: int) -> None:
    given = TrainerOptions(**options)
    assert (given.max_epochs, given.max_steps) == (epochs, steps)


def test_a_fast_run_limits_each_loader_and_writes_nothing() -> None:
    given = TrainerOptions(fast_dev_run=True, limit_val_batches=0.5, check_val_every_n_epoch=5, val_check_interval=7)
    assert given.limit_train_batches == given.limit_val_batches == given.limit_test_batches == 1
    assert (given.num_sanity_val_steps, given.check_val_every_n_epoch, given.val_check_interval) == (0, 1, 1.0)
    assert not given.enable_checkpointing
    assert not given.enable_telemetry


@pytest.mark.parametrize(
    ("devices", "accelerator", "chosen"),
    [
        ("auto", "cpu", [0]), (3, "cpu", [0, 1, 2]), ("3", "cpu", [0, 1, 2]), ([2, 5], "cpu", [2, 5]),
        ("2,5", "cpu", [2, 5]), ("5,", "cpu", [5]), ("auto", "mps", [0]), (1, "mps", [0]),
        (ListConfig([2, 5]), "cpu", [2, 5]),
    ],
)  # fmt: skip
def test_devices_are_a_number_or_a_list(devices: Any, accelerator: str, chosen: list[int]) -> None:
    assert check_devices(devices, accelerator) == chosen
    assert len(check_devices(-1, "cpu")) == os.cpu_count()


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (0, "set 'auto', a positive number"), (-2, "a positive number"), (True, "a positive number"),
        (1.5, "a positive number"), ("two", "set 'auto', a number, or a list of numbers"), ([], "at least one device"),
        ([1, 1], "each device only once"),
    ],
)  # fmt: skip
def test_no_devices_are_an_error(devices: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_devices(devices, "cpu")
    with pytest.raises(ValueError, match=r"this machine has 1 mps device"):
        check_devices([1], "mps")


@pytest.mark.parametrize(
    ("limit", "checked"),
    [(None, 1.0), (1.0, 1.0), (1, 1), (0, 0), (0.0, 0.0), (0.25, 0.25), (10, 10), (10.0, 10)],
)
def test_a_limit_is_a_fraction_or_a_number_and_all_batches_are_1_0(limit: Any, checked: float) -> None:
    found = check_limit("limit_val_batches", limit)
    assert found == checked
    assert type(found) is type(checked)


@pytest.mark.parametrize("limit", [-1, -0.5, 1.5, True, "half"])
def test_another_limit_is_an_error_with_its_name(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"limit_val_batches={limit!r}: set a number of batches"):
        check_limit("limit_val_batches", limit)


@pytest.mark.parametrize("given", ["2h30m", timedelta(hours=2.5), {"hours": 2, "minutes": 30}, "00:02:30:00"])
def test_a_time_has_several_forms(given: Any) -> None:
    assert check_max_time(given) == timedelta(hours=2, minutes=30)


def test_an_unknown_accelerator_or_a_url_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'cuda'"):
        TrainerOptions(accelerator="cdua")
    with pytest.raises(ValueError, match=r"to write checkpoints to a URL, set ModelCheckpoint\(dirpath="):
        TrainerOptions(default_root_dir="s3://bucket/runs")


def test_text_is_no_switch_and_a_schedule_no_number() -> None:
    with pytest.raises(ValueError, match="enable_progress_bar='no': set True or False"):
        TrainerOptions(enable_progress_bar="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass GradientAccumulationScheduler\(\{0: 2\}\)"):
        TrainerOptions(accumulate_grad_batches={0: 2})  # type: ignore[arg-type]
