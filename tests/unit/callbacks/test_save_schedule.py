"""Saves by steps and epochs, and the weights that a schedule considers saved."""

from __future__ import annotations

from typing import Any

import torch

from fabricx.callbacks.save_schedule import SaveSchedule, trained


def test_a_save_is_due_at_multiples_of_the_interval(trainer: Any) -> None:
    run, schedule = trainer(), SaveSchedule(None)
    schedule.start(run, resumed=False)
    due = []
    for step in range(1, 7):
        run.global_step = step
        due.append(schedule.step_due(run, 3))
    assert due == [False, False, True, False, False, True]
    assert not schedule.step_due(run, 0)
    assert not schedule.time_due(run)
    assert run.world.broadcasts == 0


def test_weights_are_saved_until_a_step_or_an_epoch_is_trained(trainer: Any) -> None:
    run, schedule = trainer(global_step=4), SaveSchedule(None)
    schedule.start(run, resumed=False)
    assert schedule.is_saved(run)
    assert schedule.is_ranked(run)
    run.global_step = 5
    assert not schedule.is_saved(run)
    schedule.saved = trained(run)
    assert schedule.is_saved(run)
    assert not schedule.is_ranked(run)
    run.state.epoch += 1  # an epoch without updates may have changed buffers
    assert not schedule.is_saved(run)


def test_a_metric_is_missing_or_of_older_weights(trainer: Any) -> None:
    run, schedule = trainer(global_step=4), SaveSchedule(None)
    assert schedule.metric_age(run, "val_loss") == (True, True)
    assert schedule.metric_age(run, "step") == (False, False)
    schedule.metric.validation_starts(None)
    run.callback_metrics["val_loss"] = torch.tensor(0.5)
    schedule.metric.validation_ends(run.callback_metrics["val_loss"], 4)
    assert schedule.metric_age(run, "val_loss") == (False, False)
    run.global_step = 5
    assert schedule.metric_age(run, "val_loss") == (False, True)


def test_a_resumed_schedule_continues_and_accepts_states_of_earlier_versions(trainer: Any) -> None:
    run, schedule = trainer(global_step=4), SaveSchedule(None)
    schedule.start(run, resumed=False)
    schedule.handled, schedule.saved, schedule.ranked, schedule.waiting = 4, (4, 1), (2, 0), True
    resumed = SaveSchedule(None)
    resumed.load(schedule.state())
    run.global_step = 6
    resumed.start(run, resumed=True)
    assert resumed.state() == schedule.state()
    resumed.load({"steps": [3, 3, 2, -1], "epochs": [1, 0]})
    assert (resumed.handled, resumed.saved, resumed.ranked, resumed.waiting) == (3, (3, 1), (2, 0), False)
