"""The contract of a data module: all data of a project in a reusable class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricx.core.hparams import HyperParameters

if TYPE_CHECKING:
    from fabricx.core.trainer import TrainerProtocol


class DataModule(HyperParameters):
    """Download, split and load data; pass an instance to `trainer.fit(module, datamodule=...)`.

    `prepare_data` runs on a single rank of each node (download, write to disk, keep no state); `setup(stage)` runs on
    every rank, with `stage` "fit", "validate", "test" or "predict".
    """

    trainer: TrainerProtocol | None = None

    def prepare_data(self) -> None:
        """Download or write files; runs on a single rank per node, so do not set attributes."""

    def setup(self, stage: str) -> None:
        """Load and split the data; runs on every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Release the resources of `setup`.

        Args:
            stage: as in `setup`.
        """

    def train_dataloader(self) -> Any:
        """Return the training batches."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation batches: an iterable, or a list of iterables."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test batches: an iterable, or a list of iterables."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the batches to predict: an iterable, or a list of iterables."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed before its transfer to the device.

        Args:
            batch: from the loader.
            dataloader_idx: index of the loader.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for types that fabricx doesn't support.

        Args:
            batch: from `on_before_batch_transfer`.
            device: device of this rank.
            dataloader_idx: index of the loader.
        """
        raise NotImplementedError  # called only if overridden; otherwise fabricx.data.to_device moves the batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed on the device.

        Args:
            batch: on the device.
            dataloader_idx: index of the loader.
        """
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a failed run.

        Args:
            exception: the error.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this data module for checkpoints, as plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict: result of `state_dict`.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "trainer"}
