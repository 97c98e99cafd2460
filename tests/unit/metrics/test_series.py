"""The values of a logged name: of the latest step, and the sum of the epoch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fabricx.metrics.series import Series, join, join_latest

KIND = ("mean", True, True, False, True, False)  # ends with `local`


def test_a_series_can_be_created_again_from_its_kind() -> None:
    series = Series.of_kind(KIND)
    assert series.kind() == KIND
    assert series.total is None


def test_the_value_of_a_step_and_the_sum_of_the_epoch_are_packed_with_their_weights() -> None:
    series = Series.of_kind(KIND)
    series.add(1.0, 1, step=1)
    series.add(4.0, 3, step=2)
    assert series.packed(epoch=False) == (12.0, 3)
    assert series.packed(epoch=True) == (13.0, 4.0)
    series.forget_epoch()
    assert (series.total, series.weights) == (None, 0.0)
    assert series.packed(epoch=False) == (12.0, 3)


def test_a_sum_that_was_restored_as_a_number_goes_on_with_the_same_bits() -> None:
    values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    calm, restored = Series.of_kind(KIND), Series.of_kind(KIND)
    for value in values:
        calm.add(value, 3, step=1)
        restored.add(value, 3, step=1)
        restored.total = float(restored.total)  # as records have it
    assert float(restored.total) == float(calm.total)


@pytest.mark.parametrize(("reduction", "neutral"), [("mean", 0.0), ("sum", 0.0), ("max", -math.inf), ("min", math.inf)])
def test_a_rank_without_a_batch_changes_no_value(reduction: Any, neutral: float) -> None:
    series = Series.of_kind((reduction, *KIND[1:]))
    series.contribute_nothing()
    assert (series.total, series.weights) == (neutral, 0.0)
    assert float(join(reduction, 3.0, 1.0, neutral, 0.0)) == 3.0


def test_latest_values_of_ranks_are_merged_if_they_are_of_the_newest_step() -> None:
    local = (*KIND[:-1], True)
    first = {"a": [KIND, 2, 1.0, 1], "old": [KIND, 1, 5.0, 1], "local": [local, 2, 7.0, 1]}
    second = {"a": [KIND, 2, 3.0, 3], "local": [local, 2, 9.0, 1]}
    assert join_latest([first, second]) == {"a": [KIND, 2, 2.5, 4], "local": [local, 2, 7.0, 1]}
    assert join_latest([]) == {}
    total = ("sum", *KIND[1:])
    assert join_latest([{"none": [total, -1, None, 0.0]}] * 2) == {}
