"""Two samples of the training data, taken without a change of the loader."""

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
from fabricx.trainer.trial import _undisturbed, two_samples


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


def test_batches_that_exist_are_taken_as_they_are() -> None:
    batches = [torch.zeros(3), torch.ones(3)]
    assert two_samples(batches) is batches[0]
    assert two_samples(DataLoader(batches, batch_size=None)) is batches[0]  # type: ignore[arg-type]


def test_what_cannot_be_copied_is_an_error() -> None:
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
