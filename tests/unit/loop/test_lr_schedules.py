"""Steps of learning rate schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.testing import TinyModule, tiny_loader


class _Plateau(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_a_checkpoint_of_an_epochs_end_has_the_metric_that_the_schedule_still_waits_for(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    def run(epochs: int, path: str | None) -> tuple[float, str]:
        saver = ModelCheckpoint(tmp_path, save_last=True)
        options = {**quiet, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": epochs}
        trainer = fx.Trainer(**options)
        trainer.fit(_Plateau(), tiny_loader(), tiny_loader(), ckpt_path=path)
        return trainer.optimizers[0].param_groups[0]["lr"], saver.last_model_path

    whole, _ = run(4, None)
    _, path = run(2, None)
    assert run(4, path)[0] == whole < 0.1
