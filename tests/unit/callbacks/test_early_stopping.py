from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fabricx.callbacks import EarlyStopping
from fabricx.callbacks.early_stopping import Decision, EarlyStoppingReason, Rule, judge
from tests.unit.callbacks.conftest import FakeSecond


def stops_after(rule: Rule, scores: list[float]) -> int | None:
    best, waited = (-math.inf if rule.mode == "max" else math.inf), 0
    for number, score in enumerate(scores):
        decision = judge(rule, score, best, waited)
        if decision.reason:
            return number
        best, waited = decision.best, decision.checks_waited
    return None


@pytest.mark.parametrize(
    ("rule", "scores", "stop"),
    [
        (Rule(patience=2), [3, 2, 1, 0], None),
        (Rule(patience=2), [1, 2, 3], 2),
        (Rule(patience=2), [1, 2, 0.5, 2, 3], 4),
        (Rule(patience=1), [1, 1], 1),
        (Rule(patience=0), [1, 2], 1),
        (Rule(patience=2, mode="max"), [1, 2, 2, 2], 3),
        (Rule(patience=1, min_delta=0.5), [3, 2.6], 1),
        (Rule(patience=1, min_delta=0.5), [3, 2.4], None),
        (Rule(), [1, math.nan], 1),
        (Rule(check_finite=False, patience=2), [1, math.nan, math.nan], 2),
        (Rule(stopping_threshold=0.1), [1, 0.5, 0.05], 2),
        (Rule(mode="max", stopping_threshold=0.9), [0.5, 0.95], 1),
        (Rule(divergence_threshold=10), [1, 20], 1),
        (Rule(mode="max", divergence_threshold=0.1), [0.5, 0.05], 1),
    ],
)
def test_it_stops_after_patience_checks_without_improvement(rule: Rule, scores: list[float], stop: int | None) -> None:
    assert stops_after(rule, scores) == stop


def test_the_reason_of_the_stop_is_printed() -> None:
    assert judge(Rule(patience=1), 0.5, 0.4, 0).reason == "did not improve on 0.4 in the last 1 checks"
    assert judge(Rule(), 0.3, 0.4, 2) == Decision(0.3, 0)


def test_a_score_beyond_the_threshold_is_not_the_best_score() -> None:
    decision = judge(Rule(stopping_threshold=0.35), 0.3, 0.4, 2)  # as in Lightning
    assert (decision.best, decision.checks_waited) == (0.4, 2)


@pytest.mark.parametrize(
    ("rule", "score", "kind"),
    [
        (Rule(), 0.3, "NOT_STOPPED"),
        (Rule(stopping_threshold=0.35), 0.3, "STOPPING_THRESHOLD"),
        (Rule(divergence_threshold=1.0), 2.0, "DIVERGENCE_THRESHOLD"),
        (Rule(patience=1), 0.5, "PATIENCE_EXHAUSTED"),
        (Rule(), math.nan, "NON_FINITE_METRIC"),
    ],
)
def test_the_criterion_has_lightnings_name_and_value(rule: Rule, score: float, kind: str) -> None:
    theirs = pytest.importorskip("lightning.pytorch.callbacks.early_stopping").EarlyStoppingReason
    criterion = judge(rule, score, 0.4, 0).kind
    assert (criterion.name, criterion.value) == (kind, theirs[kind].value)
    assert len(EarlyStoppingReason) == len(theirs)


def test_training_is_asked_to_stop(trainer: Any) -> None:
    callback = EarlyStopping("val_loss", patience=2, verbose=True)
    run = trainer(callback).start()
    for loss in (0.5, 0.6, 0.7):
        assert not run.should_stop
        run.epoch(validation={"val_loss": loss})
    assert run.should_stop
    assert callback.stopped_epoch == 2
    assert callback.wait_count == 2
    assert float(callback.best_score) == 0.5
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    resumed = EarlyStopping("val_loss", patience=2)
    resumed.load_state_dict(callback.state_dict())
    assert resumed.stopping_reason is callback.stopping_reason
    assert str(resumed.stopping_reason_message) == "val_loss did not improve on 0.5 in the last 2 checks"
    of_lightning = {"wait_count": 1, "stopped_epoch": 0, "best_score": torch.tensor(0.5), "patience": 2}
    resumed.load_state_dict(of_lightning)
    assert (resumed.reason, float(resumed.best_score)) == (None, 0.5)
    resumed.stopping_reason_message = "mine"
    assert resumed.state_dict()["reason"] == "mine"
    assert "val_loss" in run.printed[-1]
    continued = EarlyStopping("val_loss", patience=3)
    continued.load_state_dict(callback.state_dict())
    trainer(continued).start()
    assert (continued.reason, continued.stopped_epoch) == (None, 0)
    again = EarlyStopping("val_loss", patience=3)
    again.load_state_dict(continued.state_dict())  # that run has not stopped
    assert not trainer(again).start().should_stop


def test_the_sanity_check_is_not_counted(trainer: Any) -> None:
    callback = EarlyStopping("val_loss", check_on_train_epoch_end=False)
    run = trainer(callback, sanity_checking=True).start()
    run.validate(val_loss=0.001)
    assert math.isinf(callback.best_score)


def test_each_validation_within_an_epoch_is_a_check(trainer: Any) -> None:
    callback = EarlyStopping("val_loss", patience=2)
    run = trainer(callback, val_check_interval=0.5).start()
    run.validate(val_loss=0.1)
    run.validate(val_loss=0.2)
    run.validate(val_loss=0.2)
    assert run.should_stop
    run.end_epoch()
    assert callback.wait_count == 2


def test_a_metric_that_was_never_logged_is_an_error(trainer: Any) -> None:
    run = trainer(EarlyStopping("val_los")).start()
    with pytest.raises(ValueError, match="Did you mean 'val_loss'"):
        run.epoch(validation={"val_loss": 1.0})


def test_a_second_fit_may_end_an_epoch_before_its_first_validation(trainer: Any) -> None:
    run = trainer(EarlyStopping("val_loss", check_on_train_epoch_end=True), check_val_every_n_epoch=2).start()
    for validation in (None, {"val_loss": 1.0}):
        run.epoch(validation=validation)
    run.end()
    run.callback_metrics.clear()  # at the start of a fit nothing is logged
    run.start()
    run.epoch()
    with pytest.raises(ValueError, match="no metric of that name"):
        run.epoch(validation={"other": 1.0})


def test_a_metric_that_was_never_logged_is_accepted_if_not_strict(trainer: Any) -> None:
    run = trainer(EarlyStopping("other", strict=False)).start()
    with pytest.warns(UserWarning, match=r"'other', strict=False\): no metric of that name.*Logged: val_loss"):
        run.epoch(validation={"val_loss": 1.0})
    assert not run.should_stop


def test_a_training_metric_is_checked_in_a_run_without_validation(trainer: Any) -> None:
    run = trainer(EarlyStopping("loss", patience=1), num_val_batches=[]).start()
    run.epoch(loss=0.1)
    run.epoch(loss=0.2)
    assert run.should_stop


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), ("max", -1.0)])
def test_a_negative_min_delta_accepts_a_small_deterioration(trainer: Any, mode: Any, sign: float) -> None:
    stopping = EarlyStopping("val_loss", mode=mode, min_delta=-0.5, patience=1)
    run = trainer(stopping).start()
    for loss in (3.0, 3.25, 3.5):
        run.epoch(validation={"val_loss": sign * loss})
    assert not run.should_stop
    run.epoch(validation={"val_loss": sign * 4.5})
    assert run.should_stop


@pytest.mark.parametrize("arguments", [{"mode": "low"}, {"patience": -1}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="EarlyStopping"):
        EarlyStopping("val_loss", **arguments)


def test_all_ranks_use_the_value_of_the_main_rank(trainer: Any) -> None:
    callback = EarlyStopping("val_loss", patience=1)
    run = trainer(callback, world=FakeSecond(0.5, 0.4)).start()
    run.epoch(validation={"val_loss": 0.3})
    run.epoch()  # the metric is not logged in this epoch
    assert not run.should_stop
    assert float(callback.best_score) == pytest.approx(0.4)
