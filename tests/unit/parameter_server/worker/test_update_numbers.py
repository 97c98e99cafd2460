"""Late gradients have the hyperparameters of their update."""

from __future__ import annotations

from typing import Any

import pytest

from fabricx.parameter_server.wire.messages import Reply
from fabricx.parameter_server.worker.update_numbers import EARLIER, UpdateNumbers


def rates(value: float) -> Any:
    return [[{"lr": value}]]


@pytest.mark.parametrize(("update", "expected"), [(0, 0.1), (2, 0.1), (3, 0.2), (5, 0.2), (6, None), (9, None)])
def test_an_update_has_the_hyperparameters_before_the_next_change(update: int, expected: float | None) -> None:
    numbers = UpdateNumbers(0)
    numbers.keep_earlier_groups(3, rates(0.1))
    numbers.keep_earlier_groups(6, rates(0.2))
    assert numbers.earlier_groups(update) == (None if expected is None else rates(expected))


def test_the_number_of_kept_changes_is_limited() -> None:
    numbers = UpdateNumbers(0)
    for change in range(2 * EARLIER):
        numbers.keep_earlier_groups(change, rates(change))
    assert numbers.earlier_groups(0) == rates(EARLIER)  # the oldest kept version


def test_versions_without_an_update_do_not_count_as_updates() -> None:
    numbers = UpdateNumbers(4)
    assert (numbers.version, numbers.pulled) == (4, 4)
    numbers.note(Reply(version=9, skipped=2))
    assert (numbers.version, numbers.skipped, numbers.pulled) == (9, 2, 7)
