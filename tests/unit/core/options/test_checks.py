"""Checks of single options: devices, limits and times."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
from omegaconf import ListConfig

from fabricx.core.options.checks import check_devices, check_limit, check_max_time


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
    ("devices", "message"),
    [
        (0, "set 'auto', a positive number"), (-2, "a positive number"), (True, "a positive number"),
        (1.5, "a positive number"), ("two", "set 'auto', a number, or a list of numbers"), ([], "at least one device"),
        ([1, 1], "each device only once"), ([-1], "from 0 on"),
    ],
)  # fmt: skip
def test_no_devices_are_an_error(devices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_devices(devices, "cpu")
    with pytest.raises(ValueError, match=r"this machine has 1 mps device"):
        check_devices([1], "mps")


@pytest.mark.parametrize(
    ("limit", "checked"),
    [(None, 1.0), (1.0, 1.0), (1, 1), (0, 0), (0.0, 0.0), (0.25, 0.25), (10, 10), (10.0, 10)],
)
def test_a_limit_is_a_fraction_or_a_number_and_all_batches_are_1_0(limit: Any, checked: float) -> None:
    limit_value = check_limit("limit_val_batches", limit)
    assert limit_value == checked
    assert type(limit_value) is type(checked)


@pytest.mark.parametrize("limit", [-1, -0.5, 1.5, True, "half"])
def test_an_invalid_limit_is_an_error_with_its_name(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"limit_val_batches={limit!r}: set a number of batches"):
        check_limit("limit_val_batches", limit)


@pytest.mark.parametrize("value", ["2h30m", timedelta(hours=2.5), {"hours": 2, "minutes": 30}, "00:02:30:00"])
def test_a_time_can_be_written_in_several_forms(value: Any) -> None:
    assert check_max_time(value) == timedelta(hours=2, minutes=30)
