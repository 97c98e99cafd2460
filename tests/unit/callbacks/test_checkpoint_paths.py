"""Paths of new checkpoints: existing files are versioned, and what a callback keeps is not overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.callbacks.checkpoint_files import Suffixes
from fabricx.callbacks.checkpoint_paths import CheckpointPaths
from fabricx.callbacks.kept_checkpoints import KeptCheckpoints
from tests.unit.callbacks.conftest import names


def paths(folder: Path, records: KeptCheckpoints, *others: KeptCheckpoints, versions: bool = True) -> CheckpointPaths:
    return CheckpointPaths(folder, Suffixes(), versions, records, others)


def records(*kept: Path, link: str = "") -> KeptCheckpoints:
    return KeptCheckpoints(models={str(path): torch.tensor(0.5) for path in kept}, link=link)


def test_a_name_that_exists_gets_a_version_unless_its_checkpoint_is_displaced(tmp_path: Path, trainer: Any) -> None:
    run, existing = trainer(), tmp_path / "best.ckpt"
    assert paths(tmp_path, records()).free(run, "best") == str(existing)
    existing.write_text("")
    assert paths(tmp_path, records(existing)).free(run, "best") == str(tmp_path / "best-v1.ckpt")
    assert paths(tmp_path, records(existing)).free(run, "best", displaced=str(existing)) == str(existing)


def test_without_versions_only_checkpoints_of_other_callbacks_are_kept(tmp_path: Path, trainer: Any) -> None:
    run, existing = trainer(), tmp_path / "best.ckpt"
    existing.write_text("")
    own = records(existing)
    assert paths(tmp_path, own, versions=False).free(run, "best") == str(existing)
    assert paths(tmp_path, records(), own, versions=False).free(run, "best") == str(tmp_path / "best-v1.ckpt")


def test_a_link_replaces_its_own_and_no_link_of_another_callback(tmp_path: Path, trainer: Any) -> None:
    run, link = trainer(), tmp_path / "last.ckpt"
    link.symlink_to(tmp_path / "step=4.ckpt")
    assert paths(tmp_path, records(link=str(link))).link(run, "last") == str(link)
    assert paths(tmp_path, records(), records(link=str(link))).link(run, "last") == str(tmp_path / "last-v1.ckpt")


def test_a_fixed_name_has_no_version_suffix(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="best", monitor="val_loss")
    run = trainer(callback).start()
    for loss in (0.3, 0.2, 0.1):
        run.epoch(validation={"val_loss": loss})
    assert names(tmp_path / "checkpoints") == ["best.ckpt"]
    assert "callbacks" in checkpoint.load(callback.best_model_path)


def test_checkpoints_of_another_run_are_not_changed(trainer: Any, tmp_path: Path) -> None:
    first = trainer(ModelCheckpoint(dirpath=tmp_path / "mine", filename="best")).start()
    first.epoch(validation={})
    callback = ModelCheckpoint(dirpath=tmp_path / "mine", filename="best")
    second = trainer(callback).start()
    second.epoch(validation={})
    assert names(tmp_path / "mine") == ["best-v1.ckpt", "best.ckpt"]
    assert Path(callback.best_model_path).name == "best-v1.ckpt"


def test_checkpoints_of_a_resumed_run_in_another_folder_are_not_deleted(trainer: Any, tmp_path: Path) -> None:
    old = ModelCheckpoint(dirpath=tmp_path / "old", monitor="val_loss")
    trainer(old).start().epoch(validation={"val_loss": 0.5})
    new = ModelCheckpoint(dirpath=tmp_path / "new", monitor="val_loss")
    run = trainer(new)
    run.call("setup", "fit")
    new.load_state_dict(old.state_dict())
    run.call("on_train_start")
    run.epoch(validation={"val_loss": 0.7})
    assert new.best_model_path == old.best_model_path  # it still is the best
    run.epoch(validation={"val_loss": 0.4})
    assert names(tmp_path / "old") == ["epoch=0-step=4.ckpt"]
    assert names(tmp_path / "new") == ["epoch=1-step=8.ckpt"]


def test_without_a_counter_of_versions_a_name_is_overwritten(trainer: Any, tmp_path: Path) -> None:
    run = trainer(ModelCheckpoint(filename="fixed", save_top_k=-1, enable_version_counter=False)).start()
    run.epoch()
    run.epoch()
    assert names(tmp_path / "checkpoints") == ["fixed.ckpt"]
    assert checkpoint.read_manifest(tmp_path / "checkpoints" / "fixed.ckpt")["step"] == 8


def test_a_constant_name_is_the_newest_checkpoint(trainer: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="fixed", save_top_k=-1)
    run = trainer(callback).start()
    run.epoch()
    run.epoch()
    assert names(tmp_path / "checkpoints") == ["fixed.ckpt"]
    assert checkpoint.read_manifest(Path(callback.best_model_path))["step"] == 8


def test_without_a_counter_of_versions_the_checkpoint_of_another_callback_is_kept(trainer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"filename": "fixed", "monitor": "val_loss", "enable_version_counter": False}
    lowest, highest = ModelCheckpoint(**options), ModelCheckpoint(**options, mode="max")
    run = trainer(lowest, highest).start()
    for loss in (0.3, 0.5, 0.4):
        run.epoch(validation={"val_loss": loss})
    steps = [checkpoint.read_manifest(Path(best.best_model_path))["step"] for best in (lowest, highest)]
    assert steps == [4, 8]
