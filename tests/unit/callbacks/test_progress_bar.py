from __future__ import annotations

import io
import math
import pickle
import re
import sys
import time
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar, progress_bar
from fabricx.callbacks.progress_bar import Lines, Speed, Terminal, View
from fabricx.testing import TinyModule, tiny_loader


class Metrics:
    """Counts how often the metrics are read."""

    def __init__(self) -> None:
        self.reads = 0

    def items(self) -> Any:
        self.reads += 1
        return {"loss": 0.5}.items()


def test_a_view_as_one_line() -> None:
    view = View("epoch 1/3", 32, 64, 8.0, {"loss": 0.12345, "accuracy": 1.0})
    assert view.text() == "epoch 1/3  32/64  8 it/s  0:04 left  loss=0.1235  accuracy=1"
    assert View("epoch 2", 7).text() == "epoch 2  7"
    assert View("test", 64, 64, 1234.5).text() == "test  64/64  1234 it/s"
    assert View("e", 0, 10_000, 1.0).text() == "e  0/10000  1 it/s  2:46:40 left"


def test_speed_leaves_out_pauses() -> None:
    speed = Speed(0, now=0.0)
    assert speed.update(10, now=1.0) == 10
    speed.pause(100)
    assert speed.update(20, now=102.0) == 10
    assert speed.overall(20, now=102.0) == 10


def test_a_log_file_gets_a_line_at_the_end_of_each_epoch(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(ProgressBar(), progress_bar_metrics={"loss": 0.5}).start()
    run.epoch(validation={})
    run.epoch(validation={})
    run.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["epoch 0/2", "4/4"], ["epoch 1/2", "4/4"]]
    assert all(line.endswith("loss=0.5") for line in lines)


def test_a_log_file_gets_a_line_every_few_seconds(
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


def test_metrics_are_only_read_to_be_drawn(trainer: Any) -> None:
    metrics = Metrics()
    run = trainer(ProgressBar(), progress_bar_metrics=metrics).start()
    run.call("on_train_epoch_start")
    for _ in range(100):
        run.step()
    assert metrics.reads == 0
    run.end_epoch()
    assert metrics.reads == 1


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_an_evaluation_of_its_own_ends_with_a_line(
    trainer: Any, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
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


def test_other_ranks_and_a_rate_of_zero_show_nothing(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (trainer(ProgressBar(), is_global_zero=False), trainer(ProgressBar(refresh_rate=0))):
        run.start()
        run.epoch(validation={})
        run.end()
    assert capsys.readouterr().err == ""


def test_a_batch_that_draws_nothing_costs_little(trainer: Any) -> None:
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


def test_on_a_terminal_what_is_printed_appears_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen_text = Tty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen_text)
    monkeypatch.setattr(sys, "stdout", screen_text)
    screen = progress_bar.open_screen()
    assert isinstance(screen, Terminal)
    screen.draw(View("epoch 1/2", 3, 10, 5.0, {"loss": 0.5}))
    ProgressBar().print("a line of the user's")
    screen.draw(View("epoch 1/2", 4, 10, 5.0))
    screen.close()
    screen.keep(View("epoch 1/2", 10, 10))
    assert sys.stdout is screen_text
    text = screen_text.getvalue()
    assert "a line of the user's\n" in text
    assert "3/10" in text
    assert "loss=0.5" in text
    assert text.index("3/10") < text.index("a line of") < text.index("4/10")
    assert text.endswith("epoch 1/2  10/10\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_of_a_terminal_is_wrapped_or_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen_text = io.StringIO()
    screen_text.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", screen_text)
    screen = progress_bar.open_screen()
    metrics = {f"a_metric_with_a_long_name_{number}": 1 / 3 for number in range(4)}
    for total in (10, math.inf):
        screen.draw(View("epoch 1/2", 3, total, 5.0, metrics))
    screen.close()
    screen.keep(View("epoch 1/2", 10, 10, 5.0, metrics))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen_text.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert max(map(len, lines)) <= columns
    for number in range(4):
        assert text.count(f"a_metric_with_a_long_name_{number}=0.3333") >= 3
    assert text.count("epoch 1/2") >= 3
    assert "…" not in text


def test_without_a_terminal_there_are_lines() -> None:
    assert isinstance(progress_bar.open_screen(), Lines)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="refresh_rate"):
        ProgressBar(refresh_rate=-1)


def test_the_bars_of_lightning_are_names_of_the_same_bar() -> None:
    assert [bar.refresh_rate for bar in (TQDMProgressBar(20), RichProgressBar(0, theme=object()))] == [None, 0]
    with pytest.raises(ValueError, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
    for name in ("init_train_tqdm", "configure_columns"):
        with pytest.warns(UserWarning, match=f"Mine.{name} is never called.*override get_metrics"):
            type("Mine", (TQDMProgressBar,), {name: print})


def test_a_subclass_chooses_the_values(quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    class Mine(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {"steps": trainer.global_step, "kind": "mine"}

    options = quiet | {"enable_progress_bar": True}
    trainer = fx.Trainer(max_epochs=1, callbacks=Mine(), **options)
    trainer.fit(TinyModule(), tiny_loader())
    assert f"steps={trainer.global_step}  kind=mine" in capfd.readouterr().err
    assert sum(callback.trainer_role == "progress_bar" for callback in trainer.callbacks) == 1


class Percent(ProgressBar):
    """Is written as Lightning's documentation shows it, with properties of the base class."""

    train_description = "training"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_validation_batch_end(trainer, *args)
        self.seen.append((self.trainer is trainer, self.total_train_batches, self.total_val_batches_current_dataloader))


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
