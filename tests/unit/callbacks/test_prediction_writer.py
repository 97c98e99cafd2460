from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import BasePredictionWriter
from fabricx.testing import TinyModule, tiny_data, tiny_loader


class Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any = "batch_and_epoch") -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        assert torch.equal(prediction, batch[0])
        self.batches.append((dataloader_idx, batch_idx, batch_indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


class Echo(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch[0]


def test_each_prediction_is_written_with_its_index_in_the_data_set(quiet: dict[str, Any]) -> None:
    writer = Writer()
    shuffled = DataLoader(tiny_data(10), batch_size=4, shuffle=True)
    assert fx.Trainer(callbacks=writer, **quiet).predict(Echo(), shuffled, return_predictions=False) is None
    [(predictions, [indices])] = writer.epochs
    assert [(0, number, of_batch) for number, of_batch in enumerate(indices)] == writer.batches
    assert sorted(index for batch in indices for index in batch) == list(range(10))
    for prediction, of_batch in zip(predictions, indices, strict=True):
        assert torch.equal(prediction, tiny_data(10).tensors[0][of_batch])


def test_several_loaders_and_data_without_indices_are_written(quiet: dict[str, Any]) -> None:
    writer = Writer()
    stream = list(tiny_loader(4, 2))
    batches = DataLoader(tiny_data(6), batch_sampler=[[5, 0], [3]])
    fx.Trainer(callbacks=writer, **quiet).predict(Echo(), [batches, iter_of(stream)])
    [(predictions, indices)] = writer.epochs
    assert indices == [[[5, 0], [3]], [None, None]]
    assert [len(of_loader) for of_loader in predictions] == [2, 2]
    assert [entry[0] for entry in writer.batches] == [0, 0, 1, 1]


class iter_of:  # noqa: N801
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_a_writer_without_the_method_of_its_interval_is_refused(quiet: dict[str, Any]) -> None:
    class Half(BasePredictionWriter):
        def write_on_batch_end(self, *args: Any) -> None: ...

    with pytest.raises(ValueError, match="Half has no write_on_epoch_end"):
        fx.Trainer(callbacks=Half("batch_and_epoch"), **quiet).predict(Echo(), tiny_loader())
    with pytest.raises(ValueError, match="must be one of"):
        Writer("never")
