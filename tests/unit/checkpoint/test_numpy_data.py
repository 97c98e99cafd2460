"""numpy arrays and numbers in files of torch are read without numpy's reconstruction functions."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricx.checkpoint.foreign import read_foreign
from fabricx.checkpoint.unread import is_unread
from fabricx.errors import CheckpointError

WEIGHTS = {"w": torch.ones(1)}
VALUES = [
    np.float64(0.5), np.float32(0.1), np.int64(3), np.bool_(True), np.str_("ab"), np.datetime64("2020-01-02T03", "h"),
    np.complex64(1 + 2j),
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 2), np.float16),
    np.array(["a", "bcd"]), np.array(["2020-01-02"], dtype="datetime64[D]"), np.arange(3, dtype=">i4"),
    np.dtype("float32"), np.array([1, 2], dtype="timedelta64[15m]"),
]  # fmt: skip


def read(folder: Path, hparams: Any) -> dict[str, Any]:
    torch.save({"state_dict": WEIGHTS, "hyper_parameters": hparams}, folder / "x.ckpt")
    return read_foreign(folder / "x.ckpt").hparams


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_of_numpy_are_read(value: Any, tmp_path: Path) -> None:
    nested = argparse.Namespace(value=value, inner=[(value,), {"of": value}])
    content = read(tmp_path, {"value": value, "nested": nested})
    inner, nested_fields = content["nested"].inner
    for array in (content["value"], content["nested"].value, inner[0], nested_fields["of"]):
        assert type(array) is type(value)
        assert np.array_equal(array, value)
        assert getattr(array, "dtype", array) == getattr(value, "dtype", value)


class Crafted:
    """An array with an object dtype, whose bytes would be used as addresses."""

    def __init__(self, *arguments: Any, state: Any = None) -> None:
        self._arguments, self._state = arguments, state

    def __reduce__(self) -> Any:
        make = np.zeros(1).__reduce__()[0] if self._arguments and self._arguments[0] is np.ndarray else np.dtype
        return make, self._arguments, self._state


@pytest.mark.parametrize("value", [
    Crafted("f8", False, True, state=(3, "<", None, ("a",), {"a": 1}, -1, -1, 63)),
    Crafted(np.ndarray, (0,), b"b", state=(1, (4,), np.dtype("f8"), False, b"short")),
    Crafted(np.ndarray, (0,), b"b", state=(1, (10**12,), np.dtype("f8"), False, b"12345678")),
    Crafted(np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("f8"), False, ["a"])),
    Crafted("M8", False, True, state=(4, "<", None, None, None, -1, -1, 0, ({}, (b"s],O8", 1, 1, 1)))),
], ids=["flags", "short", "large", "a list", "a unit"])  # fmt: skip
def test_crafted_arrays_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(tmp_path, {"value": value})


@pytest.mark.parametrize("value", [
    np.array([None, "a"], dtype=object), np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]), Crafted("O8", False, True),
], ids=["objects", "fields", "a type of objects"])  # fmt: skip
def test_arrays_of_objects_are_not_read(value: Any, tmp_path: Path) -> None:
    assert is_unread(read(tmp_path, {"value": value})["value"])


def test_recursive_lists_and_datetimes_are_read(tmp_path: Path) -> None:
    cycle: list[Any] = [np.float64(1.0)]
    cycle.append(cycle)
    content = read(tmp_path, {"cycle": cycle, "day": datetime.datetime(2020, 1, 2), "wait": datetime.timedelta(1)})
    assert content["cycle"][1] is content["cycle"]
    assert (content["day"], content["wait"]) == (datetime.datetime(2020, 1, 2), datetime.timedelta(1))
