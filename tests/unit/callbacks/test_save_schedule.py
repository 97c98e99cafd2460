"""Saves by steps and epochs, and the weights that a schedule considers saved."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint, time_interval
from fabricx.callbacks.save_schedule import SaveSchedule, trained
from fabricx.testing import TinyModule, tiny_loader
from tests.unit.callbacks.conftest import names, number


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


def test_checkpoints_are_saved_by_steps(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)).start()
    run.epoch(validation={})
    run.epoch(validation={})
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


def test_batches_of_one_window_save_once(trainer: Any) -> None:
    run = trainer(ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)).start()
    saved: list[str] = []
    run.save_checkpoint = lambda path, **options: saved.append(Path(path).name)
    run.step()
    run.call("on_train_batch_end", None, None, 1)  # a batch without a weight update
    run.step()
    assert saved == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


def test_saves_by_steps_wait_for_the_metric_of_a_validation(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=2, save_last=True)
    run = trainer(callback, val_check_interval=3).start()
    folder = tmp_path / "checkpoints"
    run.step()
    run.step()
    assert callback.best_model_path == ""
    assert (folder / "last.ckpt").resolve().name == "epoch=0-step=2.ckpt"  # the newest doesn't wait
    run.step()
    run.validate(val_loss=0.5)
    assert Path(callback.best_model_path).name == "epoch=0-step=3.ckpt"
    run.step()  # a value exists now, but of older weights
    assert list(map(float, callback.best_k_models.values())) == [0.5]
    run.validate(val_loss=0.4)
    assert Path(callback.best_model_path).name == "epoch=0-step=4.ckpt"
    assert names(folder) == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt"]


def test_each_validation_within_an_epoch_saves_a_checkpoint(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(monitor="val_loss", save_top_k=-1), val_check_interval=0.5).start()
    for loss in (0.2, 0.1):
        run.step()
        run.step()
        run.validate(val_loss=loss)
    run.end_epoch()
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


def test_every_n_epochs_2_saves_every_second_epoch(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(every_n_epochs=2, save_top_k=-1)).start()
    for _ in range(5):
        run.epoch(validation={})
    assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]


def test_checkpoints_are_saved_by_time(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(f"{time_interval.__name__}.time.monotonic", lambda: now)
    callback = ModelCheckpoint(train_time_interval="10s", save_top_k=-1)
    assert callback.train_time_interval == timedelta(seconds=10)
    run = trainer(callback).start()
    for _ in range(25):
        now += 1.0
        run.step()
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=10.ckpt", "epoch=0-step=20.ckpt"]


def test_a_metric_of_the_training_epoch_can_be_monitored(trainer: Any) -> None:
    callback = ModelCheckpoint(monitor="train_loss")
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": 1.0}, train_loss=0.25)
    assert number(callback.best_model_score) == 0.25


def test_a_monitored_metric_may_be_logged_late(trainer: Any) -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    run = trainer(callback, check_val_every_n_epoch=2, sanity_checking=True).start()
    run.call("on_validation_end")  # the sanity check: nothing is saved, no error
    run.sanity_checking = False
    run.epoch()  # no validation in the first epoch
    run.epoch(validation={"val_loss": 0.5})
    assert Path(callback.best_model_path).name == "epoch=1-step=8.ckpt"


def test_a_run_that_stops_before_its_first_validation_is_not_an_error(trainer: Any) -> None:
    run = trainer(ModelCheckpoint(monitor="val_loss")).start()
    run.step()
    run.end_epoch(complete=False)
    run.end()


@pytest.mark.parametrize("options", [{}, {"save_top_k": -1}, {"save_last": True}], ids=str)
def test_a_metric_that_is_never_logged_is_an_error_if_saves_are_due_by_steps(
    options: dict[str, Any], trainer: Any
) -> None:
    run = trainer(ModelCheckpoint(monitor="no_such_metric", every_n_train_steps=2, **options), num_val_batches=[])
    run.start()

    def train() -> None:
        for _ in range(2):
            run.epoch(loss=0.5)

    with pytest.raises(ValueError, match=r"monitor='no_such_metric'\): no metric of that name was logged"):
        train()


def test_a_second_fit_has_no_metric_of_an_epoch_before_its_first_epoch_ends(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(monitor="loss", every_n_train_steps=3), num_val_batches=[]).start()
    run.epoch(loss=0.5)
    run.end()
    run.callback_metrics.clear()  # at the start of a fit nothing is logged
    run.start()
    run.epoch(loss=0.25)
    assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt"]
    run.callback_metrics.clear()
    with pytest.raises(ValueError, match="no metric of that name"):
        run.epoch()


def test_save_top_k_0_needs_no_metric(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(monitor="no_such_metric", save_top_k=0, every_n_train_steps=3), num_val_batches=[])
    run.start()
    for _ in range(2):
        run.epoch()
    run.step()
    run.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save_top_k", [-1, 9])
def test_a_checkpoint_by_steps_has_the_metric_of_the_next_validation(
    save_top_k: int, tmp_path: Path, quiet: dict[str, Any]
) -> None:
    class Counts(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("updates", float(self.global_step))

    callback = ModelCheckpoint(
        tmp_path, "{step}-{updates:.0f}", "updates", every_n_train_steps=2, mode="max", save_top_k=save_top_k
    )
    options = {**quiet, "callbacks": [callback], "val_check_interval": 2, "max_epochs": 2}
    fx.Trainer(**options).fit(Counts(), tiny_loader(8, 2), tiny_loader())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"step={n}-updates={n}.ckpt" for n in (2, 4, 6, 8)]
    assert Path(callback.best_model_path).name == "step=8-updates=8.ckpt"
    callback.to_yaml()
    rows = (tmp_path / "best_k_models.yaml").read_text().splitlines()
    assert rows == [f"{tmp_path}/step={n}-updates={n}.ckpt: {n}.0" for n in (2, 4, 6, 8)]


class CountsSamples(TinyModule):
    """Fits a buffer to the data; with `updates`, also steps in each batch of the first epoch."""

    def __init__(self, updates: bool) -> None:
        super().__init__()
        self.updates = updates
        self.register_buffer("samples", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples += len(batch[0])
        return super().training_step(batch, batch_idx) if self.updates and self.current_epoch == 0 else None


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"limit_val_batches": 0}], ids=str)
def test_epochs_without_an_update_are_saved(
    options: dict[str, Any], updates: bool, tmp_path: Path, quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(epochs: int, ckpt: Path | None = None) -> Path:
        callback = ModelCheckpoint(tmp_path, "{epoch}", save_last=True, save_top_k=-1)
        settings: dict[str, Any] = {**quiet, "callbacks": [callback], "max_epochs": epochs, **options}
        fx.Trainer(**settings).fit(CountsSamples(updates), tiny_loader(), tiny_loader(4), ckpt_path=ckpt)
        return Path(callback.best_model_path)

    first = fit(2)
    assert (first.name, names(tmp_path)) == ("epoch=1.ckpt", ["epoch=0.ckpt", "epoch=1.ckpt"])
    assert checkpoint.load(first)["strategy"]["module"]["samples"] == 32
    newest = fit(3, first)
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    assert checkpoint.load(newest)["strategy"]["module"]["samples"] == 48
    assert (tmp_path / "last.ckpt").resolve() == newest
    assert "already complete" not in capsys.readouterr().out
    fit(3, newest)
    assert len(names(tmp_path)) == 3


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
def test_a_run_without_an_update_has_a_last_checkpoint(tmp_path: Path, quiet: dict[str, Any]) -> None:
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, single_file=True)
    fx.Trainer(**{**quiet, "callbacks": [callback], "max_epochs": 1}).fit(CountsSamples(False), tiny_loader())
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    assert checkpoint.load(Path(callback.last_model_path))["strategy"]["module"]["samples"] == 16
