from __future__ import annotations

from typing import Any

import pytest

from fabricx.callbacks import GradientAccumulation, GradientAccumulationScheduler


def test_the_number_of_batches_follows_the_schedule(trainer: Any) -> None:
    run = trainer(GradientAccumulation({1: 4, 3: 8})).start()
    seen = []
    for _ in range(4):
        run.epoch()
        seen.append(run.accumulate_grad_batches)
    run.end()
    assert seen == [1, 4, 4, 8]
    assert run.accumulate_grad_batches == 8  # remains
    again = run.start()
    assert again.accumulate_grad_batches == 1


def test_keys_may_be_strings_as_in_a_configuration_file() -> None:
    assert GradientAccumulation({"10": 2, "9": "4"}).scheduling == {9: 4, 10: 2}  # type: ignore[dict-item]


@pytest.mark.parametrize("schedule", [{}, {-1: 2}, {0: 0}, {0: 2.5}, {0.5: 2}, {"a": 2}, {0: None}, [1, 2]])
def test_wrong_schedules_are_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match="GradientAccumulation"):
        GradientAccumulation(schedule)


def test_it_is_importable_by_lightnings_name() -> None:
    assert GradientAccumulationScheduler is GradientAccumulation
