"""Ranking of checkpoints by a metric, and the weights to which a value belongs."""

from __future__ import annotations

import math

import torch

from fabricx.callbacks.checkpoint_ranking import MetricAge, admit, best, worst


def test_equal_scores_keep_the_older_checkpoint() -> None:
    assert admit({"a": 0.5}, 0.5, k=1, mode="min") == (False, None)


def test_all_checkpoints_are_kept_with_minus_1() -> None:
    assert admit({"a": 0.1, "b": 0.2}, 9.0, k=-1, mode="min") == (True, None)


def test_nan_is_never_the_best_and_is_removed_first() -> None:
    scores = {"a": math.nan, "b": 2.0, "c": 1.0}
    assert [best(scores, "min"), best(scores, "max"), worst(scores, "min"), worst(scores, "max")] == [
        "c",
        "b",
        "a",
        "a",
    ]
    assert best({"a": math.nan}, "min") == best({}, "max") == worst({}, "min") == ""
    assert admit(scores, 5.0, k=3, mode="min") == (True, "a")
    assert admit(scores, math.nan, k=3, mode="min") == (False, None)


def test_a_validation_metric_is_outdated_after_a_step() -> None:
    age, value = MetricAge(), torch.tensor(1.0)
    assert not age.stale(3)
    age.validation_starts(value)
    age.validation_ends(value, 3)  # logged by training: the validation has not changed it
    assert not age.stale(4)
    age.validation_starts(value)
    age.validation_ends(torch.tensor(1.0), 4)  # an equal but newer value
    assert [age.stale(4), age.stale(5)] == [False, True]
    age.validation_ends(value, 5)  # of a run that was resumed within it
    assert [age.validated_step, age.stale(5), age.stale(6)] == [5, False, True]
    age.validation_starts(None)
    age.forget_validation()
    age.validation_starts(None)
    age.validation_ends(None, 6)
    assert not age.stale(7)
