"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels in ten classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module


class DigitsClassifier(Module):
    """One convolution and two linear layers.

    Args:
        hidden: width of the linear layer between; the convolution has a quarter of it as channels.
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
        """Return logits, shape [batch, 10], of images, shape [batch, 64], in [0, 1]."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the likeliest digit of each image, shape [batch]."""
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
    """1,197 images to train on, 300 to validate and 300 to test, always the same.

    Args:
        batch_size: images of a batch on each rank.
        num_workers: processes that load data; the data is in memory, so none are needed.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.parts: list[Dataset[Any]] = []

    def setup(self, stage: str) -> None:
        """Load and split."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        whole = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
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
