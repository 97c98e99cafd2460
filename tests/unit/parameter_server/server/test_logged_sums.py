"""Logged values are counted exactly when the gradient of the same message is used."""

from __future__ import annotations

from typing import Any

import pytest

from fabricx.distributed.statistics.metric_sums import merge_sums
from fabricx.parameter_server.server.logged_sums import LoggedSums


def sums(value: float, how: str = "mean") -> dict[str, Any]:
    return {"a": [[how], value, 2]}


def test_values_of_a_dropped_gradient_are_not_counted() -> None:
    logged = LoggedSums()
    logged.open(0)
    logged.add(0, (sums(1.0), {}), used=True)
    logged.add(0, (sums(10.0), sums(2.0)), used=False)  # 2.0 belongs to the first gradient
    logged.add(0, (sums(100.0), sums(20.0)), used=True)  # 20.0 to the second
    logged.add(1, (sums(1000.0), {}), used=True)
    assert logged.of(0)["a"][1:] == [1103.0, 8]


def test_the_sums_of_a_section_are_kept_until_the_second_next_section_begins() -> None:
    logged = LoggedSums()
    for section in (0, 1):
        logged.open(section)
        logged.add(0, (sums(float(section)), {}), used=True)
    assert [logged.of(section)["a"][1] for section in (0, 1)] == [0.0, 1.0]
    logged.open(2)
    assert [logged.of(section) for section in (0, 2)] == [{}, {}]


@pytest.mark.parametrize(("how", "expected"), [("mean", 5.0), ("sum", 5.0), ("max", 3.0), ("min", 2.0)])
def test_sums_are_merged_by_their_kind(how: str, expected: float) -> None:
    first = sums(2.0, how)
    assert merge_sums(first, sums(3.0, how))["a"][1:] == [expected, 4]
    assert first == sums(2.0, how)
