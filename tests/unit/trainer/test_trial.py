"""Two samples of the training data, read without a change of the loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fabricx.core.strategy import Traits
from fabricx.data.combined import CombinedLoader
from fabricx.distributed.world import World
from fabricx.metrics.collector import Logbook
from fabricx.trainer.trial import _undisturbed, _with_copy, other_batches, two_samples


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        for number in range(3):
            self.given += 1
            yield torch.tensor(float(number))


def test_samples_of_a_data_set_are_collated() -> None:
    data = [torch.tensor(float(n)) for n in range(5)]
    assert two_samples(DataLoader(data, 4, shuffle=True)).tolist() == [0.0, 1.0]  # type: ignore[arg-type]
    assert two_samples(DataLoader(data[:1], 4)).tolist() == [0.0, 0.0]  # type: ignore[arg-type]


def test_a_stream_stays_at_its_position() -> None:
    stream = Stream()
    assert two_samples(DataLoader(stream, 2)).tolist() == [0.0, 1.0]
    assert stream.given == 0


def test_existing_batches_are_used_unchanged() -> None:
    batches = [torch.zeros(3), torch.ones(3)]
    assert two_samples(batches) is batches[0]
    assert two_samples(DataLoader(batches, batch_size=None)) is batches[0]  # type: ignore[arg-type]


def test_other_batches_have_short_and_long_samples() -> None:
    words = [torch.tensor([1, 2, 3, 4]) for _ in range(40)]
    words[21][1:] = 0
    loader = DataLoader([{"ids": ids, "name": "a"} for ids in words], 8)  # type: ignore[arg-type]
    lengths = [(batch["ids"] > 0).sum(1).tolist() for batch in other_batches(loader)]
    assert [4, 4] in lengths  # far apart: their masks may be random
    assert [4, 1] in lengths or [1, 4] in lengths
    uneven: Any = DataLoader([torch.ones(2), torch.ones(3), torch.ones(2)], 2)  # type: ignore[arg-type]
    assert [batch.shape for batch in other_batches(uneven)] == []  # they can't be collated


def test_other_batches_of_streams_do_not_change_the_position() -> None:
    stream = Stream()
    assert [batch.tolist() for batch in other_batches(DataLoader(stream, 2))] == [[0.0, 1.0]]
    assert stream.given == 0
    batches = [torch.full((3,), float(number)) for number in range(6)]
    assert [float(batch[0]) for batch in other_batches(batches)] == [1.0, 3.0, 4.0]


def test_batches_that_cannot_be_copied_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"can't be copied.*Pass a DataLoader of a map-style data set"):
        two_samples(number for number in range(3))
    with pytest.raises(ValueError, match="combine the data sets in one DataLoader"):
        two_samples(CombinedLoader([DataLoader([1.0])], "min_size"))  # type: ignore[arg-type]


def test_a_step_whose_backward_needs_a_buffer_that_it_changed_can_be_tried() -> None:
    class Mean(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.weight = nn.Parameter(torch.ones(()))

    module = Mean()
    logbook = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(), module=None)), training=True)
    metrics = SimpleNamespace(training=logbook, collect=lambda to: None)
    with _undisturbed(cast(Any, SimpleNamespace(module=module, metrics=metrics))):
        module.scale.mul_(2.0)
        loss = module.weight * module.scale  # batch normalisation keeps its statistics for backward
    assert float(module.scale) == 1.0
    loss.backward()


def test_a_step_that_changes_its_batch_can_be_tried_again() -> None:
    def step(batch: dict[str, Tensor], index: int) -> float:
        return float(batch.pop("labels").add_(index).sum())

    batch = {"ids": torch.ones(2), "labels": torch.ones(2)}
    assert [_with_copy(step, batch, 1) for _ in range(2)] == [4.0, 4.0]
