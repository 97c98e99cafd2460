"""Training for tests of recovery: the weights of the module count how often each sample was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.testing import QUIET, Fault, Ledger, layered_data

SAMPLES, BATCH, EPOCHS = 48, 12, 3
STEPS = EPOCHS * SAMPLES // BATCH


class Numbered(Dataset[Any]):
    """Samples with their indices."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.data = layered_data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


def train(
    strategy: Any,
    faults: list[Fault],
    tmp_path: Path,
    *,
    recovery: Any = None,
    devices: int = 2,
    module: Any = None,
    data: Any = None,
    val_samples: int = SAMPLES,
    num_workers: int = 0,
    **options: Any,
) -> tuple[Ledger, fx.Trainer]:
    torch.manual_seed(3)
    module = module or Ledger(SAMPLES, BATCH)
    # The next fault may precede the completion of a snapshot, so there may be many restarts without progress.
    recovery = recovery or FaultRecovery(max_restarts=20, every_n_train_steps=2)
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=EPOCHS, default_root_dir=tmp_path,
        callbacks=[*faults, recovery], **{**QUIET, **options},
    )  # fmt: skip
    loader: Any = DataLoader(data or Numbered(), BATCH // devices, shuffle=True, num_workers=num_workers)
    trainer.fit(module, loader, DataLoader(Numbered(val_samples), 16))
    return module, trainer


def exact(module: Ledger, times: float = EPOCHS) -> bool:
    """Return whether each sample was trained `times` times; 1e-4 is about 100 roundings, and a sample counts 1."""
    return bool((module.entries.detach() + times).abs().max() < 1e-4)
