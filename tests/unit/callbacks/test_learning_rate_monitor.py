from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import fabricx as fx
from fabricx.callbacks import LearningRateMonitor
from fabricx.callbacks.learning_rate_monitor import rate_names
from fabricx.loggers import CSVLogger
from fabricx.testing import TinyModule, tiny_loader


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def open(self, run_dir: Path) -> None:
        """Does nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((metrics, step))


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1))]


def test_names_are_equal_to_lightnings() -> None:
    two = SGD([{"params": weights(), "lr": 0.1}, {"params": weights(), "lr": 0.2}])
    named = SGD([{"params": weights(), "lr": 0.1, "name": "head"}])
    assert rate_names([Adam(weights())], [None]) == [["lr-Adam"]]
    assert rate_names([two], [None]) == [["lr-SGD/pg1", "lr-SGD/pg2"]]
    assert rate_names([named], [None]) == [["lr-SGD/head"]]
    assert rate_names([Adam(weights()), Adam(weights())], [None, None]) == [["lr-Adam"], ["lr-Adam-1"]]
    assert rate_names([Adam(weights())], ["warmup"]) == [["warmup"]]


def test_rates_are_logged_at_log_steps_only(trainer: Any) -> None:
    logger, optimizer = Recorder(), SGD(weights(), lr=0.1, momentum=0.9, weight_decay=0.01)
    callback = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    run = trainer(callback, loggers=[logger], optimizers=[optimizer]).start()
    for rate in (0.1, 0.2, 0.3, 0.4):
        optimizer.param_groups[0]["lr"] = rate
        run.step()
    assert [(row["lr-SGD"], step) for row, step in logger.rows] == [(0.2, 2), (0.4, 4)]
    assert logger.rows[0][0]["lr-SGD-momentum"] == 0.9
    assert logger.rows[0][0]["lr-SGD-weight_decay"] == 0.01
    assert callback.lrs["lr-SGD"] == [0.2, 0.4]


def test_a_main_rank_without_a_sample_of_the_batch_logs_before_the_update(trainer: Any) -> None:
    logger, optimizer = Recorder(), SGD(weights(), lr=0.1)
    callback = LearningRateMonitor("step")
    run = trainer(callback, loggers=[logger], optimizers=[optimizer]).start()
    run.step()
    for update in (1, 2, 3):
        run.global_step = update
        for _ in range(2):  # optimizers
            callback.on_before_optimizer_step(run, nn.Module(), optimizer)
    assert [step for _, step in logger.rows] == [2, 4]


def test_equal_names_of_parameter_groups_are_refused() -> None:
    same = SGD([{"params": weights(), "name": "head"}, {"params": weights(), "name": "head"}], lr=0.1)
    with pytest.raises(ValueError, match="lr-SGD has several parameter groups named head"):
        rate_names([same], [None])


def test_by_default_a_rate_is_logged_at_the_interval_of_its_scheduler(trainer: Any) -> None:
    logger = Recorder()
    optimizers = [SGD(weights(), lr=0.1, momentum=0.9), Adam(weights(), lr=0.2), Adam(weights(), lr=0.3)]
    schedules = [
        SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 9), name=None, interval=interval)
        for optimizer, interval in zip(optimizers, ("epoch", "step"), strict=False)
    ]
    callback = LearningRateMonitor(log_momentum=True, log_key_prefix="train/")
    run = trainer(callback, loggers=[logger], optimizers=optimizers, lr_schedulers=schedules).start()
    assert callback.lrs == {"train/lr-SGD": [], "train/lr-Adam": [], "train/lr-Adam-1": []}
    run.epoch()
    assert callback.lrs == {"train/lr-SGD": [0.1], "train/lr-Adam": [0.2] * 2, "train/lr-Adam-1": [0.3] * 3}
    assert callback.last_momentum_values["train/lr-SGD-momentum"] == 0.9
    optimizers[0].add_param_group({"params": weights()})
    run.epoch()
    assert callback.lrs["train/lr-SGD/pg1"] == [0.1] * 2
    assert callback.lrs["train/lr-SGD/pg2"] == [0.1]


def test_each_scheduler_of_an_optimizer_has_a_chart(trainer: Any) -> None:
    logger, optimizer = Recorder(), SGD(weights(), lr=0.1)
    schedules = [
        SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 9), name=name, interval="epoch")
        for name in (None, None, "decay", "decay")
    ]
    callback = LearningRateMonitor()
    run = trainer(callback, loggers=[logger], optimizers=[optimizer], lr_schedulers=schedules).start()
    run.epoch()
    assert callback.lrs == {name: [0.1] for name in ("lr-SGD", "lr-SGD-1", "decay", "decay-1")}


def test_rates_are_logged_by_epoch(trainer: Any) -> None:
    logger, optimizer = Recorder(), Adam(weights(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule = SimpleNamespace(scheduler=scheduler, name="decay", interval="epoch")
    run = trainer(LearningRateMonitor("epoch"), loggers=[logger], optimizers=[optimizer], lr_schedulers=[schedule])
    run.start()
    run.epoch()
    run.epoch()
    run.state.batch = 2  # of a run that was resumed within an epoch
    run.call("on_train_epoch_start")
    assert [(row["decay"], step) for row, step in logger.rows] == [(0.1, 0), (0.1, 4)]


def test_only_the_main_rank_logs_rates(trainer: Any) -> None:
    logger = Recorder()
    run = trainer(LearningRateMonitor(), loggers=[logger], optimizers=[Adam(weights())], is_global_zero=False).start()
    run.epoch()
    assert logger.rows == []


def test_a_run_without_a_logger_is_refused(trainer: Any) -> None:
    with pytest.raises(ValueError, match="logger=False"):
        trainer(LearningRateMonitor()).start()


def test_rates_are_logged_if_several_updates_of_a_batch_pass_the_interval(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Twice(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    monitor = LearningRateMonitor("step")
    options = quiet | {"logger": CSVLogger(tmp_path), "log_every_n_steps": 4}
    trainer = fx.Trainer(max_epochs=1, callbacks=monitor, **options)
    trainer.fit(Twice(), tiny_loader(16, 2))  # before the batches, 0, 2, ..., 14 updates are complete
    assert [len(rates) for rates in monitor.lrs.values()] == [3]


def test_zeros_of_an_optimizer_without_momentum_are_a_warning(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Averaged(TinyModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.ASGD(self.parameters(), lr=0.1)

    monitor, logger = LearningRateMonitor(log_momentum=True), CSVLogger(tmp_path)
    trainer = fx.Trainer(max_steps=1, callbacks=monitor, **quiet | {"logger": logger, "log_every_n_steps": 1})
    with pytest.warns(RuntimeWarning, match="log_momentum=True. logs 0 for ASGD"):
        trainer.fit(Averaged(), tiny_loader())
    assert monitor.last_momentum_values == {"lr-ASGD-momentum": 0.0}


def test_an_unknown_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="logging_interval"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
