from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import OnExceptionCheckpoint
from fabricx.testing import TinyModule, tiny_loader


class Fails(TinyModule):
    def __init__(self, at: int = -1) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.at:
            raise RuntimeError("the user's error")
        return super().training_step(batch, batch_idx)


def test_an_error_leaves_a_checkpoint_to_resume_from(quiet: dict[str, Any], tmp_path: Path) -> None:
    saved = OnExceptionCheckpoint(tmp_path / "saved", "failed")
    with pytest.raises(RuntimeError, match="the user's error"):
        fx.Trainer(max_epochs=2, callbacks=saved, **quiet).fit(Fails(3), tiny_loader())
    assert checkpoint.read_manifest(Path(saved.ckpt_path))["step"] == 3
    trainer = fx.Trainer(max_epochs=2, callbacks=saved, **quiet)
    trainer.fit(Fails(), tiny_loader(), ckpt_path=saved.ckpt_path)
    assert trainer.current_epoch == 2


def test_an_interrupted_run_is_saved(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Stops(TinyModule):
        def on_train_batch_end(self, *args: Any) -> None:
            assert self.trainer is not None
            if self.global_step == 2:
                self.trainer.request_stop("interrupted")

    saved = OnExceptionCheckpoint(tmp_path)
    trainer = fx.Trainer(max_epochs=2, callbacks=saved, **quiet)
    trainer.fit(Stops(), tiny_loader())
    assert trainer.interrupted
    assert checkpoint.read_manifest(Path(saved.ckpt_path))["step"] == trainer.global_step


def test_after_a_failure_of_workers_the_newest_checkpoint_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, newest = OnExceptionCheckpoint(tmp_path / "out"), tmp_path / "newest.ckpt"
    saved.after_failure(None)
    assert "no checkpoint is left" in capsys.readouterr().out
    checkpoint.save(newest, {"a": 1}, {"step": 4})
    saved.after_failure(newest)
    saved.after_failure(newest)
    assert checkpoint.is_committed(saved.ckpt_path)
    with pytest.raises(ValueError, match="must not be empty"):
        OnExceptionCheckpoint(tmp_path, "")
