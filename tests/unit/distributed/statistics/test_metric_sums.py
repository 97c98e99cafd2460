"""Sums of logged values are joined in any order."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch

from fabricx.distributed.statistics.metric_sums import merge_sums


def sums(reduction: str, total: Any, weights: float) -> dict[str, Any]:
    return {"value": [[reduction, False, True], total, weights]}


@pytest.mark.parametrize(
    ("reduction", "total"), [("mean", 7.0), ("sum", 7.0), ("max", 4.0), ("min", 1.0)]
)  # fmt: skip
def test_merging_parts_is_independent_of_their_order_and_does_not_change_them(reduction: str, total: float) -> None:
    parts = [sums(reduction, torch.tensor(1.0), 1), sums(reduction, 2.0, 3), sums(reduction, 4.0, 5), {}]
    before = copy.deepcopy(parts)
    for order in itertools.permutations(parts):
        assert functools.reduce(merge_sums, order)["value"][1:] == [total, 9]
    assert parts == before


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_not_hidden_by_an_extreme(reduction: str, values: tuple[float, float]) -> None:
    first, second = (sums(reduction, value, 1) for value in values)
    assert math.isnan(merge_sums(first, second)["value"][1])
