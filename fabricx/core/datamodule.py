"""The contract of a data module: all data of a project in one reusable class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricx.core.hparams import HyperParameters

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


class DataModule(HyperParameters):
    """Download, split and load data; give it to `trainer.fit(module, datamodule=...)`.

    `prepare_data` runs on one rank of each node (download, write to disk, keep no state); `setup(stage)` runs on every
    rank, with `stage` one of "fit", "validate", "test", "predict".
    """

    trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Download or write files; runs on one rank per node, so keep no state here."""

    def setup(self, stage: str) -> None:
        """Load and split, on every rank."""

    def teardown(self, stage: str) -> None:
        """Give back what `setup` took."""

    def train_dataloader(self) -> Any:
        """Return the training batches."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation batches: one iterable, or a list of them."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test batches: one iterable, or a list of them."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the batches to predict: one iterable, or a list of them."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bring a batch to the device; override for types that fabricx doesn't know."""
        raise NotImplementedError  # never called unless overridden: fabricx.data.to_device does it

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a run that failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this data module, as plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "trainer"}
