"""From self.log to callbacks, loggers and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torchmetrics

import fabricx as fx
from fabricx.core.logger import Logger
from fabricx.testing import TinyModule, tiny_loader


class Keeps(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def open(self, run_dir: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self, status: Any = "success") -> None: ...


class Logs(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("count", float(self.global_step + 1), on_step=True, prog_bar=True)
        self.log("hidden", 1.0, logger=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", 10.0 * dataloader_idx + batch_idx)
        self.log("both", float(dataloader_idx), add_dataloader_idx=False)
        self.log(f"own{dataloader_idx}", 1.0, add_dataloader_idx=False)


def rows(quiet: dict[str, Any], name: str, **options: Any) -> list[tuple[int, float]]:
    keeps = Keeps()
    trainer = fx.Trainer(**{**quiet, "logger": keeps, "num_sanity_val_steps": 2, **options})
    trainer.fit(Logs(), tiny_loader(24, 4), tiny_loader(8, 4))
    assert all("hidden" not in row for _, row in keeps.rows)
    return [(step, row[name]) for step, row in keeps.rows if name in row]


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (0, [])], ids=str
)  # fmt: skip
def test_loggers_have_a_row_every_n_updates(every: int, steps: list[int], quiet: dict[str, Any]) -> None:
    assert rows(quiet, "count", max_epochs=1, log_every_n_steps=every) == [(step, float(step)) for step in steps]


def test_the_sanity_check_is_in_no_row(quiet: dict[str, Any]) -> None:
    assert rows(quiet, "val", max_epochs=2) == [(6, 0.5), (12, 0.5)]


def test_each_evaluation_loader_has_its_own_results_and_the_common_results(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(**quiet)
    first, second = trainer.validate(Logs(), [tiny_loader(8, 4), tiny_loader(4, 4)], verbose=False)
    assert first == {"val/dataloader_idx_0": 0.5, "both": pytest.approx(1 / 3), "own0": 1.0}
    assert second == {"val/dataloader_idx_1": 10.0, "both": pytest.approx(1 / 3), "own1": 1.0}
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == first | second


def test_callbacks_read_the_newest_values_in_each_batch_and_the_bar_has_only_prog_bar_values(
    quiet: dict[str, Any],
) -> None:
    seen: list[tuple[float, dict[str, float]]] = []

    class Reads(fx.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append((float(trainer.callback_metrics["count"]), dict(trainer.progress_bar_metrics)))

    fx.Trainer(max_steps=3, callbacks=[Reads()], **quiet).fit(Logs(), tiny_loader(24, 4))
    assert [value for value, _ in seen] == [1.0, 2.0, 3.0]
    assert [bar["count"] for _, bar in seen] == [1.0, 2.0, 3.0]
    assert all("hidden" not in bar for _, bar in seen)


def test_values_of_evaluation_batches_are_logged_with_an_increasing_number(quiet: dict[str, Any]) -> None:
    class Batches(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("one", float(batch_idx), on_step=True, on_epoch=False)
            self.log("two", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

    keeps = Keeps()
    trainer = fx.Trainer(**{**quiet, "logger": keeps, "max_epochs": 2})
    trainer.fit(Batches(), tiny_loader(8, 4), tiny_loader(12, 4))
    single = [(step, row["one"], row["two_step"]) for step, row in keeps.rows if "one" in row]
    assert single == [(1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 0, 0), (5, 1, 1), (6, 2, 2)]
    assert [(step, row["two_epoch"]) for step, row in keeps.rows if "two_epoch" in row] == [(2, 1.0), (4, 1.0)]
    assert {"one", "two_step"}.isdisjoint(trainer.callback_metrics)  # of the last batch on the main rank alone
    assert {"two", "two_epoch"} <= trainer.callback_metrics.keys()
    assert {"one", "two_step", "two_epoch"} <= trainer.logged_metrics.keys()
    assert trainer.progress_bar_metrics == {"two_step": 2.0, "two_epoch": 1.0}


def test_the_value_of_a_metric_object_is_in_the_rows_of_the_evaluation_batches_that_log_it(
    quiet: dict[str, Any],
) -> None:
    class Batches(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            if dataloader_idx == 0 and batch_idx < 2:
                self.mean(batch_idx + 1)
                self.log("mean", self.mean, on_step=True, on_epoch=True)
            self.log("batch", batch_idx, on_step=True)

    keeps = Keeps()
    trainer = fx.Trainer(**{**quiet, "logger": keeps})
    trainer.validate(Batches(), [tiny_loader(12, 4), tiny_loader(4, 4)], verbose=False)
    rows = [row.get("mean_step/dataloader_idx_0") for _, row in keeps.rows]
    assert rows == [1.0, 2.0, None, None, None]
    assert keeps.rows[-1][1]["mean_epoch/dataloader_idx_0"] == 1.5


def test_the_progress_bar_and_the_loggers_use_the_same_names(quiet: dict[str, Any]) -> None:
    class Bar(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("both", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
            self.log("step", float(batch_idx), prog_bar=True)
            return super().training_step(batch, batch_idx)

    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Bar(), tiny_loader(12, 4))
    assert trainer.progress_bar_metrics == {"both_step": 2.0, "both_epoch": 1.0, "step": 2.0}
    assert trainer.logged_metrics.keys() == {"both_step", "both_epoch", "step", "loss"}


def test_each_call_of_the_trainer_begins_without_the_metrics_of_the_last(quiet: dict[str, Any]) -> None:
    module, trainer = TinyModule(), fx.Trainer(max_epochs=1, **quiet)

    def names() -> list[set[str]]:
        return [set(trainer.callback_metrics), set(trainer.logged_metrics)]

    trainer.fit(module, tiny_loader(), tiny_loader())
    assert names() == [{"loss", "val_loss"}] * 2
    trainer.test(module, tiny_loader(), verbose=False)
    assert names() == [{"test_loss"}] * 2
    trainer.validate(module, tiny_loader(), verbose=False)
    assert names() == [{"val_loss"}] * 2
    trainer.predict(module, tiny_loader())
    assert names() == [set()] * 2


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_validation_end", "on_validation_model_train", "on_train_end", "on_fit_end"]
)
def test_logging_where_no_value_would_be_published_is_an_error(hook: str, quiet: dict[str, Any]) -> None:
    class Late(TinyModule): ...

    setattr(Late, hook, lambda self: self.log("x", 1.0))
    with pytest.raises(ValueError, match=r"self.log\('x', ...\) was called where metrics can't be logged"):
        fx.Trainer(max_epochs=1, **quiet).fit(Late(), tiny_loader(8, 4), tiny_loader(4, 4))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_end", "on_validation_epoch_end"])
def test_a_hook_between_batches_has_no_step_to_log(hook: str, quiet: dict[str, Any]) -> None:
    class Between(TinyModule): ...

    setattr(Between, hook, lambda self: self.log("x", 1.0, on_step=True))
    with pytest.raises(ValueError, match=r"'x'.*was called between two batches.*: remove on_step=True"):
        fx.Trainer(max_epochs=1, **quiet).fit(Between(), tiny_loader(8, 4), tiny_loader(4, 4))


class _ReadsAtEnds(TinyModule):
    """Reads values and metric objects in the hooks at the end of epochs, and logs a further value in each."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.train_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.seen: list[tuple[str, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.train_mean(float(batch_idx + 10 * self.current_epoch))
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(float(batch_idx + 10 * self.current_epoch))
        self.log("mean", self.mean)
        self.log("same", float(batch_idx + 10 * self.current_epoch))

    test_step = validation_step

    def _note(self, hook: str, name: str, metric: Any) -> None:
        self.seen.append((hook, float(self.trainer.callback_metrics[name]), float(metric.compute())))
        self.log(f"{hook}_end", self.seen[-1][1])

    def on_train_epoch_end(self) -> None:
        self._note("train", "train_mean", self.train_mean)

    def on_validation_epoch_end(self) -> None:
        self._note("val", "same", self.mean)

    def on_test_epoch_end(self) -> None:
        self._note("test", "mean", self.mean)


def test_hooks_at_the_end_of_an_epoch_read_its_values_and_its_metric_objects(quiet: dict[str, Any]) -> None:
    module, keeps = _ReadsAtEnds(), Keeps()
    trainer = fx.Trainer(max_epochs=2, **{**quiet, "logger": keeps, "num_sanity_val_steps": 0})
    trainer.fit(module, tiny_loader(12, 4), tiny_loader(12, 4))
    epochs = [("val", 1.0, 1.0), ("train", 1.0, 1.0), ("val", 11.0, 11.0), ("train", 11.0, 11.0)]
    assert module.seen == epochs  # each object is reset after the hooks
    assert {k: float(v) for k, v in trainer.callback_metrics.items() if k.endswith("_end")} == {
        "val_end": 11.0, "train_end": 11.0,
    }  # fmt: skip
    assert [set(row) for _, row in keeps.rows if "mean" in row] == [{"mean", "same", "val_end", "epoch"}] * 2
    [results] = trainer.test(module, tiny_loader(12, 4), verbose=False)
    assert (results, module.seen[4:]) == ({"mean": 21.0, "same": 21.0, "test_end": 21.0}, [("test", 21.0, 21.0)])


class _ReadsWhatItLogs(TinyModule):
    """Reads its logged values in the hooks at the end of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.seen: list[tuple[float | None, ...]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(float(self.current_epoch))

    def _read(self, name: str) -> None:
        trainer = self.trainer
        values = [trainer.callback_metrics.get(name), trainer.logged_metrics.get(name)]
        shown = [
            value if value is None else float(value) for value in (*values, trainer.progress_bar_metrics.get(name))
        ]
        self.seen.append(tuple(shown))

    def on_validation_epoch_start(self) -> None:
        self.log("start", 5.0)
        assert self.trainer.world_size > 1 or "start" not in self.trainer.callback_metrics or self.current_epoch

    def on_validation_epoch_end(self) -> None:
        self.log("val", 2.0 + self.current_epoch, prog_bar=True)
        self._read("val")
        self.log("object", self.mean, prog_bar=True)
        self._read("object")

    def on_train_epoch_end(self) -> None:
        self.log("train", 4.0 + self.current_epoch, prog_bar=True)
        self._read("train")


def test_hooks_at_the_end_of_an_epoch_read_values_that_they_logged(quiet: dict[str, Any]) -> None:
    module = _ReadsWhatItLogs()
    trainer = fx.Trainer(max_epochs=2, **{**quiet, "num_sanity_val_steps": 0})
    trainer.fit(module, tiny_loader(8, 4), tiny_loader(8, 4))
    assert module.seen == [(value,) * 3 for value in (2.0, 0.0, 4.0, 3.0, 1.0, 5.0)]
    assert {name: float(trainer.callback_metrics[name]) for name in ("val", "object", "train")} == {
        "val": 3.0, "object": 1.0, "train": 5.0,
    }  # fmt: skip


def test_a_hook_at_the_end_of_an_epoch_that_runs_again_after_a_resume_reads_the_same_metric_objects(
    quiet: dict[str, Any], tmp_path: Any
) -> None:
    class Saves(fx.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"epoch{trainer.current_epoch}")

    fx.Trainer(max_epochs=1, callbacks=[Saves()], **quiet).fit(_ReadsAtEnds(), tiny_loader(12, 4))
    module = _ReadsAtEnds()
    module.seen = []
    trainer = fx.Trainer(max_epochs=2, **quiet)
    trainer.fit(module, tiny_loader(12, 4), ckpt_path=tmp_path / "epoch0")
    assert module.seen == [("train", 1.0, 1.0), ("train", 11.0, 11.0)]  # and the object is reset after it


class _Axis(TinyModule):
    """Sets the step of rows: the number of samples of an update, and the epoch of a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", 4.0 * self.global_step)
        self.log("now", 1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict({"step": float(self.current_epoch), "mean": 2.0})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 3.0)


def test_a_logged_value_named_step_is_the_step_of_its_row(quiet: dict[str, Any]) -> None:
    keeps = Keeps()
    trainer = fx.Trainer(**{**quiet, "logger": keeps, "max_epochs": 2, "log_every_n_steps": 1})
    trainer.fit(_Axis(), tiny_loader(8, 4), tiny_loader(8, 4))
    steps_and_names = [(step, sorted(row)) for step, row in keeps.rows if "val" not in row]
    update, epoch = ["loss", "now"], ["mean"]
    assert steps_and_names == [(0, update), (4, update), (0, epoch), (8, update), (12, update), (1, epoch)]
    assert [step for step, row in keeps.rows if "val" in row] == [2, 4]  # without: the number of updates
    assert "step" in trainer.callback_metrics


class _SharesName(TinyModule):
    """Logs a name in the training and in the validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("shared", 1.0 + batch_idx)
        self.log("own", 1.0 + batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("shared", -1.0 - self.current_epoch)


class _Reads(fx.Callback):
    def __init__(self) -> None:
        self.read: list[tuple[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.read.append(("batch", float(trainer.callback_metrics["shared"])))

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self.read.append(("validation", float(trainer.callback_metrics["shared"])))

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.read.append(("epoch", float(trainer.callback_metrics["shared"])))
        assert trainer.callback_metrics["own"] == 2.0


def test_a_name_of_steps_and_of_the_validation_has_the_value_of_the_validation_until_the_next_batch(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    reads = _Reads()
    name = "{epoch}-{shared:.0f}"
    checkpoint = fx.callbacks.ModelCheckpoint(tmp_path, monitor="shared", filename=name, save_top_k=-1)
    trainer = fx.Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[reads, checkpoint], **quiet)
    trainer.fit(_SharesName(), tiny_loader(8, 4), tiny_loader(4, 4))
    ends = [[("batch", 1.0), ("batch", 2.0), ("validation", value), ("epoch", value)] for value in (-1.0, -2.0)]
    assert reads.read == ends[0] + ends[1]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-shared=-1.ckpt", "epoch=1-shared=-2.ckpt"]
    assert trainer.callback_metrics["shared"] == -2.0


class SkipsTheSecondEpoch(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 else None


class ReadsNumbers(fx.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.callback_metrics["number"].item())


def test_an_epoch_without_batches_keeps_the_mean_of_the_epoch_before_it(quiet: dict[str, Any]) -> None:
    reads, loader = ReadsNumbers(), tiny_loader()
    fx.Trainer(max_epochs=3, callbacks=[reads], **quiet).fit(SkipsTheSecondEpoch(), loader)
    assert reads.seen == [(len(loader) - 1) / 2] * 3  # not the value of the newest step
