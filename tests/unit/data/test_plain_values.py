"""Copies of nested lists, dictionaries and arrays."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fabricx.data.plain_values import is_plain, packed, same, unpacked

VALUES: dict[str, Any] = {
    "numbers": [1, 2.5, True, None],
    "batches": [[0, 1], [2], []],
    "tuples": [(0, 1), ("a", 2)],
    "numbers of numpy": [np.int64(3), np.int64(4)],
    "mixed numbers": [np.int64(3), 4],
    "classes": {0: [1, 2], "a": np.arange(3), np.int64(2): {"b": torch.arange(2)}},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_is_equal_and_of_the_same_types(name: str) -> None:
    value = VALUES[name]
    assert is_plain(value)
    saved = packed(value)
    again = unpacked(saved)
    assert repr(again) == repr(value)
    assert same(packed(again), saved)
    assert again is not value


@pytest.mark.parametrize("name", ["batches", "numbers", "classes"])
def test_a_change_in_place_is_detected(name: str) -> None:
    value = copy.deepcopy(VALUES[name])
    before = packed(value)
    if name == "classes":
        value["a"][0] = 7
    else:
        value.reverse()
    assert not same(before, packed(value))
    assert repr(unpacked(before)) == repr(VALUES[name])


@pytest.mark.parametrize(
    "value",
    [
        [{1}],
        {"a": object()},
        {(1, 2): 3},
        [np.array(["a"])],
        [torch.ones(2, requires_grad=True)],
        3,
        (1, 2),
    ],
)
def test_other_values_are_not_plain(value: Any) -> None:
    assert not is_plain(value)


def test_a_recursive_list_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabricx.data.plain_values._LISTS", 100)
    value: list[Any] = []
    value.append(value)
    assert not is_plain(value)
