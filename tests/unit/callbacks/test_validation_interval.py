from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint, time_interval
from fabricx.testing import TinyModule, tiny_loader


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(time_interval, "time", fake_clock)
    return fake_clock


class Timed(TinyModule):
    """Each step lasts 1 s and each validation 10 s; records the steps of validations."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.validations = clock, list[int]()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.clock.now += 1

    def on_validation_start(self) -> None:
        self.clock.now += 10
        if not self.trainer.sanity_checking:
            self.validations.append(self.global_step)


def validated(clock: Clock, quiet: dict[str, Any], ckpt: Any = None, **options: Any) -> list[int]:
    module = Timed(clock)
    trainer = fx.Trainer(**{"max_epochs": 3, **quiet, **options})
    trainer.fit(module, tiny_loader(), tiny_loader(), ckpt_path=ckpt)
    assert trainer.current_epoch == 3
    return module.validations


@pytest.mark.parametrize("interval", [timedelta(seconds=5), "00:00:00:05", {"seconds": 5}, "5s"], ids=str)
def test_a_validation_follows_a_duration_since_the_newest_validation(
    interval: Any, clock: Clock, quiet: dict[str, Any]
) -> None:
    assert validated(clock, quiet, val_check_interval=interval) == [5, 10]  # of 12 steps; none at the end of an epoch


def test_validation_by_time_follows_check_val_every_n_epoch(clock: Clock, quiet: dict[str, Any]) -> None:
    assert validated(clock, quiet, val_check_interval="2s", check_val_every_n_epoch=2) == [5, 7]
    assert validated(clock, quiet, val_check_interval="3s", check_val_every_n_epoch=None) == [3, 6, 9, 12]


def test_updates_of_several_batches_are_not_interrupted(clock: Clock, quiet: dict[str, Any]) -> None:
    assert validated(clock, quiet, val_check_interval="2s", accumulate_grad_batches=2) == [2, 4, 6]


def test_a_stop_at_the_same_batch_validates_once(clock: Clock, quiet: dict[str, Any]) -> None:
    module = Timed(clock)
    stop = fx.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == 5)
    )
    trainer = fx.Trainer(**{"max_epochs": 3, **quiet, "val_check_interval": "5s", "callbacks": [stop]})
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert (trainer.global_step, module.validations) == (5, [5])


@pytest.mark.filterwarnings("ignore:the checkpoint has the state of ModelCheckpoint")
def test_a_checkpoint_before_the_validation_continues_with_it(
    clock: Clock, quiet: dict[str, Any], tmp_path: Any
) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"val_check_interval": "5s", "enable_checkpointing": True, "callbacks": [saver]}
    assert validated(clock, {**quiet, **options}) == [5, 10]
    assert validated(clock, {**quiet, "val_check_interval": "5s"}, tmp_path / "epoch=1-step=5.ckpt") == [5, 10]


@pytest.mark.parametrize("interval", ["", "fast", "5x", timedelta(seconds=-1), {"years": 1}, "00:30"], ids=str)
def test_values_that_are_neither_a_count_nor_a_duration_are_refused(interval: Any, quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="val_check_interval"):
        fx.Trainer(val_check_interval=interval, **quiet)
