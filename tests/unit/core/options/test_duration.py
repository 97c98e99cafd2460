from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fabricx.core.options.duration import parse_count, parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2h30m", 9000),
        ("2h 30m", 9000),
        ("90s", 90),
        ("1.5H", 5400),
        ("1d", 86400),
        ("250ms", 0.25),
        ("00:12:00:00", 43200),
        ("01:00:00:01", 86401),
        (timedelta(minutes=3), 180),
        ({"hours": 1, "minutes": 1}, 3660),
    ],
)
def test_a_duration_can_be_written_in_many_ways(value: Any, seconds: float) -> None:
    assert parse_duration(value).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "soon", "10", "2h2h", "-1h", "1x", "h", "12:00"])
def test_values_that_are_not_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can't be parsed"):
        parse_duration(text)


def test_a_number_without_a_unit_is_an_error_that_asks_for_the_unit() -> None:
    with pytest.raises(ValueError, match='Did you mean "10s" or "10m"'):
        parse_duration("10")


@pytest.mark.parametrize("value", ["9999999999d", {"days": 1e12}])
def test_a_duration_has_a_largest_value(value: Any) -> None:
    with pytest.raises(ValueError, match="too long"):
        parse_duration(value)


@pytest.mark.parametrize("value", [timedelta(0), "0s", {"hours": 0}])
def test_a_duration_may_be_0(value: Any) -> None:
    assert parse_duration(value) == timedelta(0)


@pytest.mark.parametrize("value", [timedelta(seconds=-1), {"hours": -1}])
def test_a_duration_is_not_negative(value: Any) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        parse_duration(value)


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="hour"):
        parse_duration({"hour": 1})


@pytest.mark.parametrize(
    ("text", "count"),
    [("500st", (500, "step")), ("3ep", (3, "epoch")), ("10_000 ba", (10000, "batch")), ("7", (7, ""))],
)
def test_a_count_has_a_unit(text: str, count: tuple[int, str]) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "st", "1.5ep", "-3ep", "3 epochs", "3x"])
def test_values_that_are_not_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can't be parsed"):
        parse_count(text)
