"""Deletion of checkpoints: only the callback's own checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.callbacks.checkpoint_files import remove_own
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.checkpoint.hostile import saved


def test_paths_in_a_checkpoint_delete_no_files_and_request_no_url(tmp_path: Path) -> None:
    own_folder, other = tmp_path / "own", tmp_path / "other"
    precious = [saved(other), saved(tmp_path)]
    (own_folder / "folder").mkdir(parents=True)
    links = [
        str(own_folder / ".." / "other" / "one"),
        str(precious[0]),
        str(own_folder / "folder"),
        "s3://nowhere/at/all",
    ]
    saver = ModelCheckpoint(own_folder, monitor="step", mode="max", every_n_train_steps=1, save_top_k=1)
    trainer = fx.Trainer(max_steps=1, callbacks=[saver], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(TinyModule(), tiny_loader())
    hostile = {
        **saver.state_dict(), "dirpath": str(other), "best_k_models": {path: torch.tensor(0.0) for path in links},
        "last_target": links[0], "best_model_path": links[3],
    }  # fmt: skip
    saver.load_state_dict(hostile)
    assert saver.dirpath == str(own_folder)
    assert set(saver.best_k_models) == set(links[:3])
    assert saver.best_model_path == ""
    for path in links[:3]:
        remove_own(saver.dirpath, path)
    assert all(checkpoint.is_committed(path) for path in precious)
    assert (own_folder / "folder").is_dir()
    [kept] = checkpoint.list_committed(own_folder)
    remove_own(saver.dirpath, str(kept))
    assert checkpoint.list_committed(own_folder) == []
