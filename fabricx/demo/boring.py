"""Smallest modules and data, for reports of defects and for tests, with Lightning's names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricx.core.datamodule import DataModule
from fabricx.core.module import LightningModule

_FEATURES, _SAMPLES = 32, 64


class RandomDataset(Dataset[Tensor]):
    """Random vectors.

    Args:
        size: elements of a vector.
        length: number of vectors.
    """

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Dicts of two random vectors, of which the second is the first plus 2.

    Args:
        size: elements of a vector.
        length: number of dicts.
    """

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of random vectors, without a length.

    Args:
        size: elements of a vector.
        count: number of vectors.
    """

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.count


def _loader() -> DataLoader[Tensor]:
    return DataLoader(RandomDataset(_FEATURES, _SAMPLES))


class BoringModel(LightningModule):
    """A linear layer that learns the constant 1; it has all steps and all loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the squared error.

        Args:
            preds: output of the layer.
            labels: targets, 1 by default.
        """
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch.

        Args:
            batch: vectors.
        """
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader()

    def test_dataloader(self) -> Any:
        return _loader()

    def predict_dataloader(self) -> Any:
        return _loader()


class ManualOptimBoringModel(BoringModel):
    """The same, with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(DataModule):
    """Data for `BoringModel`, with a data set for each stage, which `setup` creates."""

    random_train: RandomDataset
    random_val: RandomDataset
    random_test: RandomDataset
    random_predict: RandomDataset

    def setup(self, stage: str) -> None:
        data = {name: RandomDataset(_FEATURES, _SAMPLES) for name in ("train", "val", "test", "predict")}
        if stage == "fit":
            self.random_train = data["train"]
        if stage in ("fit", "validate"):
            self.random_val = data["val"]
        if stage == "test":
            self.random_test = data["test"]
        if stage == "predict":
            self.random_predict = data["predict"]

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)
