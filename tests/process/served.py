"""A module that records its samples, and faults of workers and servers, for tests of parameter servers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.strategies import AsyncSGD, ParameterServer
from fabricx.testing import QUIET, LayeredModule, layered_data
from fabricx.trainer import process

SAMPLES = 43


class Numbered(Dataset[Any]):
    """Samples with their indices."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.data = layered_data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Recorded(LayeredModule):
    """Records the samples of each rank, and the counters of the servers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        torch.manual_seed(2)
        super().__init__()
        self.optimizer = optimizer
        self.samples: list[Any] = []
        self.by_rank: list[Any] = []
        self.counts: list[Any] = []
        self.traffic: list[tuple[int, int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def on_train_epoch_end(self) -> None:
        self.by_rank = self.trainer.world.gather_objects(self.samples)
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, (AsyncSGD, ParameterServer)):
            self.counts, self.traffic = strategy.counts(), self.trainer.world.gather_objects(strategy.traffic)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "momentum":
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.optimizer == "adamw":
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def train(
    strategy: Any, devices: int = 2, *, module: Any = None, ckpt: Path | None = None, batch: int = 12, **options: Any
) -> tuple[Any, fx.Trainer]:
    torch.manual_seed(2)
    module = module or Recorded()
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    loader: Any = DataLoader(Numbered(), batch, shuffle=True)
    trainer.fit(module, loader, DataLoader(Numbered(5), 1), ckpt_path=ckpt)
    return module, trainer


class Dies(Recorded):
    """Kill the first rank that reaches its fourth step; on a busy machine, another rank may never reach it.

    Args:
        main: kill the main rank; the other ranks wait for its death in their fourth step.
    """

    def __init__(self, *, main: bool = False) -> None:
        super().__init__()
        self.main = main

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if len(self.samples) != 4 or self.trainer.world.generation:
            return loss
        store, rank = self.trainer.world.store, str(self.global_rank)
        assert store is not None
        if self.main and self.global_rank:
            deadline = time.monotonic() + 60
            while not self.trainer.session.fault_tolerance.outdated:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        elif store.compare_set("dies", "", rank) == rank.encode():
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class KillsServer(Recorded):
    """Rank 0 kills the first server in its fourth step; servers publish their PIDs in the store."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0 and len(self.samples) == 3:
            os.kill(int(self.trainer.world.store.get("server 0")), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def serve_and_publish_pid(world: Any, number: int, folder: str | None, **more: Any) -> None:
    world.store.set(f"server {number}", str(os.getpid()))
    original_serve(world, number, folder, **more)


original_serve = process.serve
