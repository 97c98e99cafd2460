"""Handwritten digits: 1,797 images of 8 x 8 pixels in ten classes, in the file `digits.csv.gz`."""

from __future__ import annotations

import gzip
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module


def load_digits() -> tuple[Tensor, Tensor]:
    """Return all images and labels; `digits-LICENSE.txt` names the source.

    Returns:
        pixels in [0, 1], shape [1797, 64], and labels from 0 to 9, shape [1797].
    """
    with resources.files("fabricx.demo").joinpath("digits.csv.gz").open("rb") as file, gzip.open(file) as rows:
        table = np.loadtxt(rows, delimiter=",", dtype=np.uint8)
    return torch.tensor(table[:, :-1] / 16, dtype=torch.float32), torch.tensor(table[:, -1], dtype=torch.int64)


class DigitsClassifier(Module):
    """A convolution and two linear layers.

    Args:
        hidden: width of the hidden linear layer; the convolution has a quarter as many channels.
        lr: learning rate of Adam.
    """

    def __init__(self, hidden: int = 128, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        channels = max(1, hidden // 4)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * channels, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images.

        Args:
            images: pixels in [0, 1], shape [batch, 64].

        Returns:
            logits, shape [batch, 10].
        """
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy.

        Args:
            batch: images, shape [batch, 64], and labels, shape [batch].
            batch_idx: number of the batch.
        """
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy.

        Args:
            batch: images, shape [batch, 64], and labels, shape [batch].
            batch_idx: number of the batch.
        """
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy.

        Args:
            batch: images, shape [batch, 64], and labels, shape [batch].
            batch_idx: number of the batch.
        """
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the most likely digit of each image.

        Args:
            batch: images, shape [batch, 64], and labels, shape [batch].
            batch_idx: number of the batch.
            dataloader_idx: number of the loader.

        Returns:
            digits, shape [batch].
        """
        return torch.as_tensor(self(batch[0]).argmax(1))

    def _evaluate(self, batch: tuple[Tensor, Tensor], name: str) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{name}_loss", nn.functional.cross_entropy(logits, labels))
        self.log(f"{name}_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class DigitsData(DataModule):
    """The images: 1,197 for training, 300 for validation and 300 for the test, in a fixed split.

    Args:
        batch_size: images per batch on each rank.
        num_workers: data loader processes; 0 suffices, because the data is in memory.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: set a whole number, 1 or more")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.parts: list[Dataset[Any]] = []

    def setup(self, stage: str) -> None:
        """Load and split the images.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        whole = TensorDataset(*load_digits())
        self.parts = [*random_split(whole, [1197, 300, 300], torch.Generator().manual_seed(0))]

    def _loader(self, part: int, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.parts[part], self.batch_size, shuffle=shuffle, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training images."""
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation images."""
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(2)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(2)
