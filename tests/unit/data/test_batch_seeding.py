"""Random numbers of a batch depend on the batch, not on the process or the run that draws them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.testing import TinyModule


class _Augmented(Dataset[Any]):
    """Adds noise to its samples."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        inputs = torch.full((4,), index / 30) + torch.rand(4) + random.random() + float(np.random.rand())
        return inputs, inputs.sum(0, keepdim=True)


@pytest.mark.parametrize("processes", [0, 2])
def test_random_augmentation_is_equal_in_a_resumed_run(quiet: dict[str, Any], tmp_path: Path, processes: int) -> None:
    def run(steps: int, path: Path | None) -> tuple[fx.Trainer, TinyModule]:
        fx.seed_everything(1)
        module, trainer = TinyModule(lr=0.01), fx.Trainer(max_epochs=2, max_steps=steps, **quiet)
        trainer.fit(module, DataLoader(_Augmented(), 4, shuffle=True, num_workers=processes), ckpt_path=path)
        return trainer, module

    _, whole = run(-1, None)
    for steps in (3, 10):
        stopped, _ = run(steps, None)
        _, resumed = run(-1, stopped.save_checkpoint(tmp_path / f"at-{steps}"))
        assert torch.equal(whole.layer.weight, resumed.layer.weight)
