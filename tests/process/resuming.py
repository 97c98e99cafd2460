"""A run that saves at each moment, and the comparison of a resumed run with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.loggers import JSONLogger
from fabricx.testing import QUIET

SAMPLES = 22  # 6 per global batch: the last global batch has 4


class Noisy(Dataset[Any]):
    """Draws from every source of random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return torch.full((4,), index / 10.0) + 0.1 * noise, torch.tensor([index % 3 - 1.0])


class AllFeatures(fx.Module):
    """Dropout, running statistics, two optimizers, three schedules, a metric object, values by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.error = torchmetrics.MeanMetric()
        self.average = torchmetrics.MeanMetric()
        error = torchmetrics.MeanSquaredError
        self.both = torchmetrics.MetricCollection({"mse": error(), "rmse": error(squared=False)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.head(self.body(batch[0]))
        loss = nn.functional.mse_loss(outputs, batch[1])
        self.both.update(outputs.detach().float(), batch[1])
        for name, metric in self.both.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        self.error.update(loss.detach(), weight=len(batch[0]))
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1]) + torch.rand(())
        self.log("val", loss)
        self.average.update(loss)
        self.log("average", self.average)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.body.parameters(), lr=0.03)
        sgd = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        schedules = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(adam, 2, 0.8), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9), "interval": "epoch"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0), "monitor": "loss_epoch"},
        ]
        return [adam, sgd], schedules


class SaveEverywhere(fx.Callback):
    """Saves once at each of the moments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, trainer: fx.Trainer, moment: str) -> None:
        path = self.folder / f"{moment}.ckpt"
        if trainer.current_epoch == 0 and not trainer.world.broadcast_object(path.exists()):
            trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):  # one of them is within a window of two batches
            self._save(trainer, f"after batch {batch_idx}")

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "between validation batches")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "after validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._save(trainer, "at the end of an epoch")


MOMENTS = [
    "after batch 1", "after batch 2", "between validation batches", "after validation", "at the end of an epoch",
]  # fmt: skip


def train(
    root: Path, strategy: str, *, workers: int = 0, ckpt: Path | None = None, saves: Path | None = None,
    callbacks: tuple[fx.Callback, ...] = (), data: Any = None, **options: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Return the logged rows, weights and optimizer states at the end, and the metrics."""
    devices = 1 if strategy == "single" else 2
    fx.seed_everything(4)
    module = AllFeatures()
    end = root / "end.ckpt"
    extra = [SaveEverywhere(saves)] if saves is not None else []
    trainer_options = {**QUIET, "max_epochs": 2, "val_check_interval": 3, "log_every_n_steps": 1, **options}
    trainer = fx.Trainer(
        strategy=strategy, devices=devices, default_root_dir=root, callbacks=[*callbacks, *extra, SaveAtEnd(end)],
        **{**trainer_options, "logger": JSONLogger()},
    )  # fmt: skip
    batch = 6 // devices
    source = (
        data
        if data is not None
        else DataLoader(
            Noisy(), batch, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
    )
    trainer.fit(module, source, DataLoader(Noisy(), batch), ckpt_path=ckpt)
    [log] = root.rglob("metrics.jsonl")
    rows = [{k: v for k, v in json.loads(line).items() if k != "time"} for line in log.read_text().splitlines()]
    return rows, checkpoint.load(end)["strategy"], trainer.callback_metrics


class SaveAtEnd(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def assert_same(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}/{number}")
    else:
        assert actual == expected, where
