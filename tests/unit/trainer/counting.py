"""A module that counts the batches of each stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Counts(TinyModule):
    """Count the batches of each stage, and stop after `stop_at` training batches."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": [], "predict": []}
        self.stop_at = stop_at
        self.grad_modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch[0])
        if self.stop_at is not None and len(self.seen["train"]) >= self.stop_at:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(batch[0])
        self.grad_modes.append(torch.is_inference_mode_enabled())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["predict"].append(batch[0])
        return batch[0]

    def counts(self) -> dict[str, int]:
        return {stage: len(batches) for stage, batches in self.seen.items()}


def fitted(module: Counts | None = None, **options: Any) -> tuple[Counts, fx.Trainer]:
    module, trainer = module or Counts(), fx.Trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **QUIET, **options})
    trainer.fit(module, tiny_loader(), tiny_loader())
    return module, trainer
