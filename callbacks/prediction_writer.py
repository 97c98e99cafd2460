"""Write predictions of each rank, by batch or at the end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from fabricx.core.callback import Callback
from fabricx.core.tensors.transfer import cpu

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


class WriteInterval(StrEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Return whether each batch is written."""
        return self in (WriteInterval.BATCH, WriteInterval.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Return whether all predictions are written at the end."""
        return self in (WriteInterval.EPOCH, WriteInterval.BATCH_AND_EPOCH)


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions; derive from it and override one or both methods.

    Each rank writes the predictions of its own batches; name the files by `trainer.global_rank`. Together the batches
    of all ranks contain each sample once, and the indices refer to the data set, so that files of any number of ranks
    can be joined. Call `trainer.predict(..., return_predictions=False)` if the predictions do not fit in memory.

    Args:
        write_interval: "batch" calls `write_on_batch_end`, "epoch" calls `write_on_epoch_end`, "batch_and_epoch" both.

    Raises:
        ValueError: the interval is unknown.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in list(WriteInterval):
            raise ValueError(f"write_interval={write_interval!r}: must be one of {', '.join(WriteInterval)}")
        self.interval = WriteInterval(write_interval)
        self._outputs: list[list[Any]] = []  # of this rank, by loader
        self._indices: list[list[Sequence[int] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of a batch.

        Args:
            trainer: the run's trainer.
            pl_module: module that predicts.
            prediction: result of `predict_step`.
            batch_indices: positions of the batch's samples in the data set; None for data without positions, such as an
                `IterableDataset`.
            batch: the data.
            batch_idx: number of the batch on this rank.
            dataloader_idx: number of the loader.
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self,
        trainer: Any,
        pl_module: Any,
        predictions: Sequence[Any],
        batch_indices: Sequence[Sequence[Sequence[int] | None]],
    ) -> None:
        """Write all predictions of this rank.

        Args:
            trainer: the run's trainer.
            pl_module: module that predicts.
            predictions: result of `predict_step` for each batch; with several loaders a list for each loader.
            batch_indices: for each loader a list with the positions of each batch's samples in the data set.
        """
        raise NotImplementedError

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        if stage != "predict":
            return
        hooks = {"batch": "write_on_batch_end", "epoch": "write_on_epoch_end"}
        for interval, name in hooks.items():
            missing = getattr(type(self), name) is getattr(BasePredictionWriter, name)
            if interval in self.interval and missing:
                raise ValueError(
                    f"write_interval={str(self.interval)!r}, but {type(self).__name__} has no {name}: define it"
                )

    def on_predict_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._outputs, self._indices = [], []

    def on_predict_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.world.represents:  # ranks of a mesh that compute a share together have the same outputs
            return
        indices = trainer.session.batch.indices
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            while len(self._outputs) <= dataloader_idx:
                self._outputs.append([])
                self._indices.append([])
            self._outputs[dataloader_idx].append(cpu(outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not self.interval.on_epoch or not trainer.world.represents:
            return
        loaders = len(trainer.num_predict_batches)
        outputs = self._outputs + [[] for _ in range(loaders - len(self._outputs))]  # loaders without a batch here
        indices = self._indices + [[] for _ in range(loaders - len(self._indices))]
        self._outputs, self._indices = [], []
        self.write_on_epoch_end(trainer, pl_module, outputs if loaders > 1 else outputs[0], indices)
