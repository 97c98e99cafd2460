"""Loaders in dicts and lists of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.data import CombinedLoader
from fabricx.data.sources import evaluation_sources, training_source
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Movable:
    """A batch object of a library: iterable, with a `to` method."""

    def __iter__(self) -> Any:
        return iter(())

    def to(self, device: Any) -> Movable:
        return self


BATCHES = list(tiny_loader(4, 2))


@pytest.mark.parametrize("source", [BATCHES, [[1.0, 2.0], [3.0]], [1.0], [], {}, range(3), [Movable(), Movable()]])
def test_a_list_of_batches_is_a_single_training_source(source: Any) -> None:
    assert training_source(source) is source


@pytest.mark.parametrize(
    "source",
    [
        [tiny_loader(), tiny_loader()], (tiny_loader(), [Stream()]), {"a": tiny_loader(), "b": [Stream()]},
        [range(2), range(3)], {"a": [1.0, 2.0], "b": [3.0]}, [Stream()], {"a": range(2)},
    ],
)  # fmt: skip
def test_loaders_are_combined_for_a_training(source: Any) -> None:
    combined = training_source(source)
    assert isinstance(combined, CombinedLoader)
    assert combined.iterables is source
    assert combined.mode == "max_size_cycle"


@pytest.mark.parametrize("choose", [training_source, evaluation_sources])
@pytest.mark.parametrize(
    "source", [[None, tiny_loader()], {"a": None, "b": tiny_loader()}, {"a": torch.ones(2)}, {"a": "text"}, {"a": 1}]
)
def test_an_object_that_is_no_loader_is_refused_among_loaders(choose: Any, source: Any) -> None:
    with pytest.raises(TypeError, match=r"An invalid dataloader was passed in a (list|dict): found \w+ where a loader"):
        choose(source)


def test_evaluation_loaders_are_read_sequentially() -> None:
    first, two, three = tiny_loader(), tiny_loader(), tiny_loader()
    both = CombinedLoader([first, two], "min_size")
    assert evaluation_sources({"a": [first, two], "b": three}) == [first, two, three]
    assert evaluation_sources([[], first]) == [[], first]
    assert evaluation_sources(CombinedLoader({"a": first, "b": two}, "sequential")) == [first, two]
    assert evaluation_sources(both) == [both]
    assert evaluation_sources([both, three]) == [both, three]
    assert evaluation_sources(BATCHES) == [BATCHES]
    assert evaluation_sources({"a": BATCHES, "b": [1.0]}) == [BATCHES, [1.0]]
    assert [evaluation_sources(nothing) for nothing in (None, [], {}, CombinedLoader([], "sequential"))] == [
        [], [], [], [[]],
    ]  # fmt: skip


class Recorder(TinyModule):
    """Records the batches of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch, batch_idx, dataloader_idx))


def test_nested_lists_are_trained_and_evaluated_and_the_trainer_has_them_as_passed() -> None:
    training, evaluation = {"a": [1.0, 2.0], "b": range(1)}, {"x": [range(2), range(1)], "y": DataLoader([5.0])}
    trainer, module = fx.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET), Recorder()
    trainer.fit(module, training, evaluation)
    assert module.seen[:2] == [{"a": 1.0, "b": 0}, {"a": 2.0, "b": 0}]
    assert module.seen[2:] == [(0, 0, 0), (1, 1, 0), (0, 0, 1), (5.0, 0, 2)]
    assert trainer.train_dataloader is training
    assert trainer.val_dataloaders is evaluation
    assert trainer.num_val_batches == [2, 1, 1]
    trainer.validate(module, CombinedLoader(evaluation, "sequential"), verbose=False)
    assert trainer.val_dataloaders is evaluation


def test_a_combined_loader_with_its_own_limits_is_refused_in_a_run() -> None:
    limited = CombinedLoader([range(3)])
    limited.limits = 1
    with pytest.raises(ValueError, match=r"CombinedLoader.limits = \[1\] has no effect in a run: set it to None"):
        fx.Trainer(max_epochs=1, **QUIET).fit(Recorder(), limited)
    with pytest.raises(ValueError, match="limit_val_batches"):
        fx.Trainer(**QUIET).validate(Recorder(), limited)


def test_training_does_not_read_loaders_sequentially() -> None:
    with pytest.raises(ValueError, match=r'mode="sequential"\) is for evaluations: for training choose "min_size"'):
        fx.Trainer(max_epochs=1, **QUIET).fit(
            TinyModule(), CombinedLoader([tiny_loader(), tiny_loader()], "sequential")
        )
