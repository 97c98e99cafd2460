from __future__ import annotations

import errno
import math
import pickle
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.checkpoint.writer import Writer
from fabricx.testing import TinyModule, tiny_loader
from tests.unit.callbacks.conftest import FakeSecond, names, number


def test_only_a_leading_tilde_is_the_home_folder() -> None:
    assert ModelCheckpoint(dirpath="~/best").dirpath == str(Path.home() / "best")
    assert ModelCheckpoint(dirpath="./~/best").dirpath == str(Path.cwd() / "~" / "best")


def test_by_default_the_newest_epoch_is_kept(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint()
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": 1.0})
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]
    run.epoch(validation={"val_loss": 2.0})
    run.end()
    assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt"]
    assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=1-step=8.ckpt")
    assert callback.best_model_score is None


def test_the_best_two_are_kept(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=2)
    run = trainer(callback).start()
    for loss in (0.5, 0.3, 0.4, 0.9):
        run.epoch(validation={"val_loss": loss})
    assert names(tmp_path / "checkpoints") == ["epoch=1-val_loss=0.30.ckpt", "epoch=2-val_loss=0.40.ckpt"]
    assert Path(callback.best_model_path).name == "epoch=1-val_loss=0.30.ckpt"
    assert Path(callback.kth_best_model_path).name == "epoch=2-val_loss=0.40.ckpt"
    assert number(callback.best_model_score) == pytest.approx(0.3)
    assert number(callback.kth_value) == pytest.approx(0.4)
    assert number(callback.current_score) == pytest.approx(0.4)
    assert callback.format_checkpoint_name({"epoch": 3, "val_loss": 0.123}, ver=2) == str(
        tmp_path / "checkpoints" / "epoch=3-val_loss=0.12-v2.ckpt"
    )


class NamesItself(ModelCheckpoint):
    def format_checkpoint_name(self, metrics: Any, *args: Any, **options: Any) -> str:
        name = f"{metrics['val_loss'].item():.1f}-after-{metrics['step'].item()}.ckpt"
        return str(Path(self.dirpath or "") / "mine" / name)


def test_a_subclass_may_override_the_names(trainer: Any, tmp_path: Path) -> None:
    callback = NamesItself(monitor="val_loss", save_top_k=1)
    run = trainer(callback).start()
    for loss in (0.5, 0.25, 0.75):
        run.epoch(validation={"val_loss": loss})
    assert names(tmp_path / "checkpoints" / "mine") == ["0.2-after-8.ckpt"]
    assert callback.best_model_path == str(tmp_path / "checkpoints" / "mine" / "0.2-after-8.ckpt")


def test_large_integers_are_not_rounded_in_names() -> None:
    metrics = {"epoch": torch.tensor(3), "step": torch.tensor(12345678)}
    assert ModelCheckpoint().format_checkpoint_name(metrics) == "epoch=3-step=12345678.ckpt"


def test_without_a_monitor_nothing_is_ranked(trainer: Any) -> None:
    callback = ModelCheckpoint(save_top_k=-1)
    trainer(callback).start().epoch(validation={"val_loss": 1.0})
    assert (callback.best_k_models, callback.kth_best_model_path, callback.current_score) == ({}, "", None)
    assert number(callback.kth_value) == float("inf")


def test_a_single_file_that_is_not_among_the_best_is_saved_as_last(quiet: dict[str, Any], own_folder: Path) -> None:
    class Rises(fx.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = TinyModule()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.tiny.training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("score", [3.0, 1.0, 2.0, 0.5][self.current_epoch])

        def configure_optimizers(self) -> Any:
            return self.tiny.configure_optimizers()

    def files(folder: str) -> list[str]:
        return sorted(path.name for path in (own_folder / folder).iterdir())

    def fit(callback: ModelCheckpoint, epochs: int, path: str | None = None) -> ModelCheckpoint:
        settings: dict[str, Any] = {**quiet, "enable_checkpointing": True, "max_epochs": epochs}
        fx.Trainer(callbacks=[callback], **settings).fit(Rises(), tiny_loader(), ckpt_path=path)
        return callback

    kept = fit(ModelCheckpoint(own_folder / "best", "{epoch}", "score", save_last=True), 3)
    assert files("best") == ["epoch=1.ckpt", "last.ckpt"]
    assert checkpoint.read_manifest(Path(kept.last_model_path))["step"] == 12
    fit(ModelCheckpoint(own_folder / "best", "{epoch}", "score", save_last=True), 4, kept.last_model_path)
    assert files("best") == ["epoch=3.ckpt", "last.ckpt"]
    assert (own_folder / "best" / "last.ckpt").resolve().name == "epoch=3.ckpt"
    assert fit(ModelCheckpoint(own_folder / "none", save_top_k=0, save_last=True), 2).best_model_path == ""
    assert files("none") == ["last.ckpt"]


def test_mode_max_keeps_the_largest_metric(trainer: Any) -> None:
    callback = ModelCheckpoint(monitor="accuracy", mode="max")
    run = trainer(callback).start()
    for accuracy in (0.5, 0.7, 0.6):
        run.epoch(validation={"accuracy": accuracy})
    assert number(callback.best_model_score) == pytest.approx(0.7)


def test_nan_is_never_the_best_metric(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": math.nan})
    assert callback.best_model_path == ""
    assert callback.best_model_score is None
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]  # saved without a better alternative
    run.epoch(validation={"val_loss": 0.5})
    run.epoch(validation={"val_loss": math.nan})
    assert Path(callback.best_model_path).name == "epoch=1-step=8.ckpt"
    assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt"]


def test_no_checkpoint_is_deleted_before_the_newer_checkpoint_is_complete(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(save_last=True)).start()
    run.epoch(validation={})

    def fails(path: str, **options: Any) -> None:
        raise OSError("disk full")

    run.save_checkpoint = fails
    with pytest.raises(OSError, match="disk full"):
        run.epoch(validation={})
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]
    assert checkpoint.is_committed(tmp_path / "checkpoints" / "last.ckpt")


def test_a_checkpoint_contains_its_own_path(trainer: Any) -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": 0.5})
    [saved] = checkpoint.load(callback.best_model_path)["callbacks"].values()
    assert (saved["monitor"], saved["kth_best_model_path"]) == ("val_loss", callback.best_model_path)  # as in Lightning
    assert number(saved["kth_value"]) == 0.5
    again = ModelCheckpoint(monitor="val_loss")
    again.load_state_dict(saved)
    assert again.best_model_path == callback.best_model_path
    assert number(again.best_model_score) == 0.5


def test_last_is_a_link_to_the_newest(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": 0.1})
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert callback.last_model_path == str(last)
    assert last.resolve().name == "epoch=0-step=4.ckpt"
    run.epoch(validation={"val_loss": 0.2})
    run.epoch(validation={"val_loss": 0.3})
    assert last.resolve().name == "epoch=2-step=12.ckpt"
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt"]
    run.epoch(validation={"val_loss": 0.01})
    assert names(tmp_path / "checkpoints") == ["epoch=3-step=16.ckpt"]
    assert checkpoint.is_committed(last)


def test_deleted_checkpoints_are_removed_from_the_records(trainer: Any, tmp_path: Path) -> None:
    old = ModelCheckpoint(monitor="val_loss")
    trainer(old).start().epoch(validation={"val_loss": 0.5})
    checkpoint.remove(old.best_model_path)
    run = trainer(old)
    run.call("on_train_start")
    assert old.best_model_path == ""
    assert old.best_model_score is None


def test_a_monitor_that_was_never_logged_is_an_error_that_names_the_nearest(trainer: Any) -> None:
    run = trainer(ModelCheckpoint(monitor="val_los")).start()
    with pytest.raises(ValueError, match="Did you mean 'val_loss'") as error:
        run.epoch(validation={"val_loss": 1.0, "accuracy": 0.5})
    assert "logged: accuracy, val_loss" in str(error.value)


def test_an_interrupted_run_is_saved(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(monitor="val_loss", save_last=True)).start()
    run.epoch(validation={"val_loss": 0.5})
    run.step()
    run.interrupted = True
    run.end_epoch(complete=False)
    run.end()
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().name == "epoch=1-step=5.ckpt"
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt", "epoch=1-step=5.ckpt"]


def test_an_interrupted_run_without_a_new_metric_is_saved_outside_of_the_ranking(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    run = trainer(callback).start()
    run.epoch(validation={"val_loss": 0.5})
    run.step()
    run.interrupted = True
    run.end_epoch(complete=False)
    run.end()
    assert names(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt", "interrupted-epoch=1-step=5.ckpt"]
    assert Path(callback.best_model_path).name == "epoch=0-step=4.ckpt"
    assert "interrupted after 5 steps" in run.printed[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_in_a_run_of_one_rank_leaves_a_checkpoint(trainer: Any, tmp_path: Path, size: int) -> None:
    run = trainer(ModelCheckpoint()).start()
    run.world.size = size
    run.step()
    run.call("on_exception", RuntimeError("mine"))
    expected = ["exception-epoch=0-step=1.ckpt"] if size == 1 else []  # saving is collective
    assert names(tmp_path / "checkpoints") == expected


def test_an_error_or_an_interruption_keeps_the_users_file_name(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(filename="mine-{step}")).start()
    run.step()
    run.call("on_exception", RuntimeError("mine"))
    run.step()
    run.interrupted = True
    run.end_epoch(complete=False)
    run.end()
    assert names(tmp_path / "checkpoints") == ["mine-step=1.ckpt", "mine-step=2.ckpt"]


def test_an_error_of_the_save_after_an_error_does_not_hide_the_first_error(trainer: Any) -> None:
    run = trainer(ModelCheckpoint()).start()
    run.step()

    def fails(path: str, **options: Any) -> None:
        raise OSError("disk full")

    run.save_checkpoint = fails
    with pytest.warns(UserWarning, match="disk full"):
        run.call("on_exception", RuntimeError("mine"))


def test_only_the_main_rank_changes_files(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(save_last=True)
    run = trainer(callback, is_global_zero=False).start()
    saved: list[str] = []
    run.save_checkpoint = lambda path, **options: saved.append(Path(path).name)
    run.epoch(validation={})
    run.epoch(validation={})
    assert saved == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]  # saving is for all ranks
    assert list(tmp_path.iterdir()) == []


def test_save_top_k_0_saves_no_checkpoint(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(save_top_k=0)).start()
    run.epoch(validation={})
    run.interrupted = True
    run.step()
    run.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "best"}, "min"),
        ({"dirpath": 3}, "dirpath=3"),
        ({"filename": 3}, "filename=3"),
        ({"monitor": 3}, "monitor=3"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"keep_every_n_steps": -1}, "keep_every_n_steps=-1"),
        ({"every_n_epochs": -1}, "0 or more"),
        ({"every_n_train_steps": "5"}, "a whole number"),
        ({"save_last": "False"}, "save_last='False'"),
        ({"train_time_interval": "soon"}, "soon"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


def test_the_newest_checkpoints_are_kept_and_every_nth_is_permanent(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_top_k=2, keep_every_n_steps=3)
    run = trainer(callback).start()
    for _ in range(8):
        run.step()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step=3.ckpt", "step=6.ckpt", "step=7.ckpt", "step=8.ckpt",
    ]  # fmt: skip
    assert Path(callback.best_model_path).name == "step=8.ckpt"


def test_a_folder_that_cannot_be_written_to_is_an_error_at_set_up(trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file" / "saved", "Not a directory"), (Path("/proc/saved"), "No such file")):
        with pytest.raises(ValueError, match=rf"cannot be written to {folder} \({reason}.*set dirpath") as error:
            trainer(ModelCheckpoint(folder)).start()
        assert isinstance(error.value.__cause__, OSError)
        trainer(ModelCheckpoint(folder, save_top_k=0)).start()  # it saves nothing


def test_the_check_of_the_folder_leaves_no_file(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(ModelCheckpoint(tmp_path / "runs" / "saved")).start()
    assert list(tmp_path.iterdir()) == []

    def is_full(dir: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", is_full)
    trainer(ModelCheckpoint(tmp_path)).start()  # space may be free later


class Named(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "{epoch}-newest"
    CHECKPOINT_JOIN_CHAR = "_"
    CHECKPOINT_EQUALS_CHAR = "-"


def test_class_attributes_are_the_parts_of_names(trainer: Any, tmp_path: Path) -> None:
    callback = Named(save_last="link")
    run = trainer(callback).start()
    run.epoch()
    run.epoch()
    links = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_symlink()]
    assert links == ["epoch-1-newest.ckpt"]  # the link of the epoch before is removed
    assert Path(callback.last_model_path).resolve().name == "epoch-1_step-8.ckpt"


def test_attributes_that_a_script_sets_on_the_class_reach_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelCheckpoint, "CHECKPOINT_NAME_LAST", "newest")
    sent = pickle.dumps(ModelCheckpoint())
    monkeypatch.undo()
    assert pickle.loads(sent).CHECKPOINT_NAME_LAST == "newest"


@pytest.mark.parametrize("monitor", ["step", "epoch"])
def test_step_and_epoch_can_be_monitored(trainer: Any, tmp_path: Path, monitor: str) -> None:
    callback = ModelCheckpoint(monitor=monitor, mode="max", save_top_k=2)
    run = trainer(callback).start()
    for _ in range(3):
        run.epoch()
    assert names(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    assert number(callback.best_model_score) == {"step": 12, "epoch": 2}[monitor]


def test_weights_of_a_run_that_ends_before_the_metric_is_logged_are_saved(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(monitor="no_such_metric", every_n_train_steps=2)).start()
    for _ in range(3):
        run.step()
    run.end_epoch(complete=False)
    with pytest.warns(UserWarning, match=r"'no_such_metric'\): no metric.*no checkpoint could be ranked; saved .*=3"):
        run.end()
    assert names(tmp_path / "checkpoints") == ["unranked-epoch=0-step=3.ckpt"]


@pytest.mark.parametrize("name", ModelCheckpoint.former_arguments)
def test_an_argument_of_lightning_1_names_its_successor(name: str) -> None:
    with pytest.raises(TypeError, match=f"ModelCheckpoint has no argument '{name}': (set|put) "):
        ModelCheckpoint(**{name: 1})


def test_a_path_that_a_hook_reads_exists_while_checkpoints_are_written_in_the_background(
    tmp_path: Path, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, reads = Writer._commit, threading.Event()

    def slow(*args: Any) -> None:
        assert reads.wait(30)
        commit(*args)

    class Reads(fx.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch:
                reads.set()
                assert Path(trainer.checkpoint_callback.best_model_path).exists()
                assert Path(trainer.checkpoint_callback.last_model_path).exists()

    monkeypatch.setattr(Writer, "_commit", slow)
    callbacks = [ModelCheckpoint(tmp_path, save_last=True), Reads()]
    fx.Trainer(max_epochs=2, callbacks=callbacks, **{**quiet, "enable_checkpointing": True}).fit(
        TinyModule(), tiny_loader()
    )
    assert reads.is_set()


def test_a_metric_may_be_logged_on_the_main_rank_only(trainer: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    callback = ModelCheckpoint(monitor="val_loss")
    run = trainer(callback, is_global_zero=False, world=FakeSecond((False, False), 0.5, path)).start()
    run.epoch(validation={"other": 1.0})
    assert callback.best_model_path == path
    assert number(callback.best_model_score) == 0.5


def test_a_checkpoint_that_is_missing_is_named_and_removed_from_the_records(trainer: Any, tmp_path: Path) -> None:
    """As after in-place recovery of a run in which a rank died before it had written its part."""
    callback = ModelCheckpoint(save_top_k=-1)
    run = trainer(callback).start()
    run.epoch()
    missing = Path(callback.best_model_path)
    shutil.rmtree(missing)
    run.epoch()
    run.end()
    [text] = run.printed
    assert text.startswith(f"{missing} was lost: it was being written when a worker died")
    assert [Path(callback.best_model_path).name] == names(tmp_path / "checkpoints")
