from __future__ import annotations

import math
import pickle
import time
from collections import UserDict
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar, progress_bar
from fabricx.core.hook_calls.hooks import check_hooks
from fabricx.testing import TinyModule, tiny_loader


class Metrics(UserDict[str, float]):
    """Counts how often the metrics are read."""

    reads = 0

    def keys(self) -> Any:
        self.reads += 1
        return super().keys()


def test_a_log_file_has_a_line_at_the_end_of_each_epoch(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(ProgressBar(), progress_bar_metrics={"loss": 0.5}).start()
    run.epoch(validation={})
    run.epoch(validation={})
    run.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["epoch 0/2", "4/4"], ["epoch 1/2", "4/4"]]
    assert all(line.endswith("loss=0.5") for line in lines)


def test_a_log_file_has_a_line_every_few_seconds(
    trainer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress_bar, "time", clock)
    run = trainer(ProgressBar(), num_training_batches=math.inf, max_epochs=-1).start()
    run.call("on_train_epoch_start")
    for _ in range(24):
        clock.now += 0.5
        run.step()
    assert capsys.readouterr().err.splitlines() == ["epoch 0  10  2 it/s", "epoch 0  20  2 it/s"]
    run.call("on_exception", RuntimeError())


def test_metrics_are_read_only_for_a_refresh(trainer: Any) -> None:
    metrics = Metrics()
    run = trainer(ProgressBar(), progress_bar_metrics=metrics).start()
    run.call("on_train_epoch_start")
    for _ in range(100):
        run.step()
    assert metrics.reads == 0
    run.end_epoch()
    assert metrics.reads == 1


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_a_separate_evaluation_ends_with_a_line(trainer: Any, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    run = trainer(ProgressBar(), num_val_batches=[2, 3])
    run.call("setup", stage)
    run.call(f"on_{stage}_start")
    for loader, batches in enumerate([2, 3]):
        for batch in range(batches):
            run.call(f"on_{stage}_batch_end", None, None, batch, loader)
    run.call(f"on_{stage}_end")
    run.call("teardown", stage)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(stage[:4])
    assert "5/5" in line


def test_other_ranks_and_a_rate_of_zero_print_nothing(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (trainer(ProgressBar(), is_global_zero=False), trainer(ProgressBar(refresh_rate=0))):
        run.start()
        run.epoch(validation={})
        run.end()
    assert capsys.readouterr().err == ""


def test_a_batch_without_a_refresh_is_cheap(trainer: Any) -> None:
    callback = ProgressBar()
    run = trainer(callback).start()
    run.call("on_train_epoch_start")
    best = math.inf
    for _ in range(20):  # the minimum of many measurements, because of load by other processes
        begun = time.perf_counter()
        for index in range(1000):
            callback.on_train_batch_end(run, run.module, None, None, index)
        best = min(best, (time.perf_counter() - begun) / 1000)
    run.end()
    assert best < 5e-6  # a tenth of the batch of the smallest model is 30 us


def test_it_can_be_pickled_in_the_middle_of_a_run(trainer: Any) -> None:
    callback = ProgressBar(refresh_rate=2)
    run = trainer(callback).start()
    run.call("on_train_epoch_start")
    again = pickle.loads(pickle.dumps(callback))
    assert again.refresh_rate == 2
    run.end()


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="refresh_rate"):
        ProgressBar(refresh_rate=-1)


def test_lightnings_progress_bars_are_aliases() -> None:
    assert [bar.refresh_rate for bar in (TQDMProgressBar(20), RichProgressBar(0, theme=object()))] == [20, 0]
    bar = TQDMProgressBar(20)
    bar.refresh_rate = 0
    assert bar.is_disabled
    with pytest.raises(ValueError, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
    for bar, name in ((TQDMProgressBar, "init_train_tqdm"), (RichProgressBar, "configure_columns")):
        with pytest.warns(UserWarning, match=f"UserBar.{name} would never be called. Its successor is get_metrics for"):
            check_hooks(type("UserBar", (bar,), {name: lambda self: None})())


def test_a_subclass_chooses_the_values(quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    class UserBar(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {"steps": trainer.global_step, "kind": "mine"}

    options = quiet | {"enable_progress_bar": True}
    trainer = fx.Trainer(max_epochs=1, callbacks=UserBar(), **options)
    trainer.fit(TinyModule(), tiny_loader())
    assert f"steps={trainer.global_step}  kind=mine" in capfd.readouterr().err
    assert sum(callback.trainer_role == "progress_bar" for callback in trainer.callbacks) == 1


class Percent(ProgressBar):
    """Written as in Lightning's documentation, with properties of the base class."""

    train_description = "training"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_validation_batch_end(trainer, *args)
        self.seen.append((self.trainer is trainer, self.total_train_batches, self.total_val_batches_current_dataloader))


def test_an_epoch_without_validation_has_no_validation_batches(quiet: dict[str, Any]) -> None:
    totals: list[float] = []

    class Bar(ProgressBar):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            totals.append(self.total_val_batches)

    bar = Bar(refresh_rate=0)
    trainer = fx.Trainer(max_epochs=3, check_val_every_n_epoch=2, callbacks=bar, **quiet)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert totals == [0, 4, 0]
    trainer.validate(TinyModule(), tiny_loader(), verbose=False)
    assert bar.total_val_batches == 4


def test_a_subclass_reads_the_trainer_and_numbers_of_batches(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Percent()
    with pytest.raises(RuntimeError, match="Percent is not attached to a trainer"):
        _ = bar.trainer
    run = trainer(bar, num_val_batches=[2, math.inf], num_test_batches=[3], num_predict_batches=[4]).start()
    run.call("on_train_epoch_start")
    run.call("on_validation_start")
    run.call("on_validation_batch_end", None, None, 0, 0)
    run.call("on_validation_batch_end", None, None, 0, 1)
    run.call("on_validation_end")
    assert bar.seen == [(True, 4, 2), (True, 4, math.inf)]
    assert (bar.total_val_batches, bar.total_test_batches_current_dataloader) == (math.inf, 0)
    assert pickle.loads(pickle.dumps(bar)).train_description == "training"
    run.end_epoch()
    bar.disable()
    assert bar.is_disabled
    run.epoch()
    bar.enable()
    run.epoch()
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["training 0/2", "training 2/2"]


class _ByEpochs(ProgressBar):
    """Overrides the refresh rate by a property without a setter, as subclasses of Lightning's bar do."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        self._refresh_rate = rate

    @property
    def refresh_rate(self) -> int:  # type: ignore[override]
        return self._refresh_rate


@pytest.mark.parametrize(("rate", "lines"), [(1, 1), (0, 0)])
def test_a_subclass_may_have_another_rate(
    rate: int, lines: int, quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    bar = _ByEpochs(rate)
    fx.Trainer(max_epochs=1, callbacks=[bar], **quiet).fit(TinyModule(), tiny_loader())
    assert (bar.refresh_rate, capfd.readouterr().err.count("epoch 0")) == (rate, lines)
