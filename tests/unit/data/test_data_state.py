"""Internal state of samplers and data sets is part of a checkpoint."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

import fabricx as fx
from fabricx.data import make_feed
from fabricx.data.data_state import (
    copied_state,
    equal_states,
    find_generators,
    generator_kind,
    generator_state,
    put_back_sampler,
    sampler_values,
    set_generator,
)
from fabricx.distributed.world import World
from fabricx.testing import QUIET

SAMPLES = 12


@dataclass
class Moments:
    mean: Tensor
    count: int


@pytest.mark.parametrize(
    ("first", "other", "equal"),
    [
        ({"a": [1, (2.0, "x")], "b": torch.ones(2)}, {"a": (1, [2.0, "x"]), "b": torch.ones(2)}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ([1, 2], [1, 2, 3], False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), [1.0, 1.0], False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(4), False),
        (1, True, False),
        (None, None, True),
        (Moments(torch.ones(2), 1), Moments(torch.ones(2), 1), True),
        (Moments(torch.ones(2), 1), Moments(torch.zeros(2), 1), False),
    ],
)
def test_states_are_equal_if_all_their_values_are_equal(first: Any, other: Any, equal: bool) -> None:
    assert equal_states(first, other) is equal


def test_the_state_of_a_data_module_is_a_copy_and_none_without_a_state() -> None:
    seen = [1]
    data: Any = type("Data", (fx.DataModule,), {"state_dict": lambda self: {"seen": seen}})()
    state = copied_state(data)
    seen.append(2)
    assert state == {"seen": [1]}
    later: Any = type("Later", (fx.DataModule,), {"state_dict": lambda self: self.loader.state_dict()})()
    assert [copied_state(owner) for owner in (later, fx.DataModule(), None)] == [None] * 3


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(7),
        "python": random.Random(7),
        "RandomState": np.random.RandomState(7),
        "PCG64": np.random.default_rng(7),
        "MT19937": np.random.Generator(np.random.MT19937(7)),
        "Philox": np.random.Generator(np.random.Philox(7)),
        "SFC64": np.random.Generator(np.random.SFC64(7)),
    }


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.normal() if hasattr(generator, "normal") else generator.gauss(0.0, 1.0))


@pytest.mark.parametrize("name", generators())
def test_a_restored_generator_repeats_its_draws(name: str) -> None:
    generator = generators()[name]
    draw(generator)
    state = generator_state(generator)
    drawn = [draw(generator) for _ in range(3)]
    other = generators()[name]
    set_generator(other, state)
    assert [draw(other) for _ in range(3)] == drawn


def test_generators_of_the_same_kind_accept_each_others_state() -> None:
    assert len({generator_kind(generator) for generator in generators().values()}) == len(generators())


class Numbers(Dataset[Any]):
    """Numbers, to which `transforms` add noise.

    Args:
        transforms: each returns a random number.
    """

    def __init__(self, transforms: list[Any] | None = None) -> None:
        self.transforms = transforms or []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index) + sum(transform() for transform in self.transforms)])


class Noise:
    """Draws from a private generator."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        return draw(self.generator)


class Shuffled(Sampler[int]):
    """Shuffles its positions in place.

    Args:
        generator: for the permutation.
        places: positions, as a list or an array.
    """

    def __init__(self, generator: Any, places: Any) -> None:
        self.random, self.places = generator, places

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.places)
        return iter([int(position) for position in self.places])


class Counted(Sampler[int]):
    """Counts its epochs in an attribute."""

    def __init__(self) -> None:
        self.epochs = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(SAMPLES).tolist())


class Batches:
    """Divides the order of a sampler into batches; not a subclass of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return SAMPLES // 3

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return (order[begin : begin + 3] for begin in range(0, SAMPLES, 3))


class OwnBatches:
    """Shuffles its batches, in place."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return (list(batch) for batch in self.batches)


class OfClasses(Sampler[int]):
    """Shuffles the positions of each class, and the class names."""

    def __init__(self, places: Any) -> None:
        self.places = defaultdict(list, {name: places(number) for number, name in enumerate("abc")})
        self.names = list(self.places)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.names)
        for name in self.names:
            np.random.shuffle(self.places[name])  # type: ignore[arg-type]
        return iter([int(position) for name in self.names for position in self.places[name]])


class RecordsSamples(fx.Module):
    """Records its training samples.

    Args:
        generator: an attribute of the module.
    """

    def __init__(self, generator: Any = None) -> None:
        super().__init__()
        self.layer, self.generator, self.seen = nn.Linear(1, 1), generator, list[Any]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = draw(self.generator) if self.generator is not None else 0.0
        self.seen.append((self.current_epoch, noise, *batch.flatten().tolist()))
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def numbers(transforms: list[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(transforms), **({"batch_size": 3, "shuffle": True} | options))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "list in place": lambda: numbers(shuffle=False, sampler=Shuffled(random.Random(1), list(range(SAMPLES)))),
    "array in place": lambda: numbers(shuffle=False, sampler=Shuffled(np.random.default_rng(1), np.arange(SAMPLES))),
    "counter": lambda: numbers(shuffle=False, sampler=Counted()),
    "batches": lambda: DataLoader(Numbers(), batch_sampler=Batches(RandomSampler(range(SAMPLES), generator=seeded()))),
    "weights": lambda: numbers(
        shuffle=False, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=seeded())
    ),
    "own batches": lambda: DataLoader(Numbers(), batch_sampler=OwnBatches([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]])),  # type: ignore[arg-type]
    "batches in tuples": lambda: DataLoader(
        Numbers(),
        batch_sampler=OwnBatches([(*map(np.int64, range(begin, begin + 3)),) for begin in range(0, 12, 3)]),  # type: ignore[arg-type]
    ),
    "lists of classes": lambda: numbers(
        shuffle=False, sampler=OfClasses(lambda number: list(range(4 * number, 4 * number + 4)))
    ),
    "arrays of classes": lambda: numbers(
        shuffle=False, sampler=OfClasses(lambda number: np.arange(4 * number, 4 * number + 4))
    ),
    "shuffle": lambda: numbers(generator=seeded()),
    "data": lambda: numbers([Noise(generator) for generator in generators().values()]),
}


def train(loader: DataLoader[Any], ckpt: Path | None = None, save: Path | None = None, **options: Any) -> list[Any]:
    fx.seed_everything(3)
    trainer, module = fx.Trainer(**{**QUIET, **options}), RecordsSamples(np.random.default_rng(2))
    trainer.fit(module, loader, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.seen


@pytest.mark.parametrize("steps", [4, 6], ids=["between epochs", "within an epoch"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_reads_the_samples_of_an_uninterrupted_run(kind: str, steps: int, own_folder: Path) -> None:
    whole = train(LOADERS[kind](), max_epochs=4)
    begun = train(LOADERS[kind](), save=own_folder / "one.ckpt", max_steps=steps)
    assert whole == begun + train(LOADERS[kind](), own_folder / "one.ckpt", max_epochs=4)
    assert len({tuple(sorted(map(str, row))) for row in whole}) == len(whole)  # epochs differ
    # Twice in a row, and with a sampler that was used before.
    loader = LOADERS[kind]()
    train(loader, own_folder / "one.ckpt", own_folder / "two.ckpt", max_steps=steps + 1)
    again = train(loader, own_folder / "two.ckpt", max_epochs=4)
    assert again == whole[steps + 1 :]


class SavesAfterEpoch(fx.Callback):
    """Saves when the first epoch ends.

    Args:
        path: where to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_a_run_resumes_at_the_end_of_an_epoch_before_its_hooks(own_folder: Path) -> None:
    kind = LOADERS["list in place"]
    whole = train(kind(), max_epochs=3, callbacks=[SavesAfterEpoch(own_folder / "one.ckpt")])
    assert train(kind(), own_folder / "one.ckpt", max_epochs=3) == whole[SAMPLES // 3 :]


def test_a_sampler_restored_for_a_complete_epoch_draws_the_next_order() -> None:
    def orders(*, interrupted: bool) -> list[Any]:
        feed = make_feed(LOADERS["list in place"](), World(), seed=5)
        epochs = [[micro.data.tolist() for micro in feed.epoch(0)]]
        if interrupted:
            feed.place_sampler(0)
        return [*epochs, *([micro.data.tolist() for micro in feed.epoch(epoch)] for epoch in (1, 2))]

    assert orders(interrupted=True) == orders(interrupted=False)


def test_a_sampler_is_restored_to_the_state_before_its_first_order() -> None:
    feed = make_feed(LOADERS["list in place"](), World(), seed=5)

    def orders() -> list[Any]:
        return [[micro.data.tolist() for micro in feed.epoch(epoch)] for epoch in (0, 1)]

    first = orders()
    feed.drawn = None  # like a copy made before the first epoch
    feed.place_sampler(0)
    assert orders() == first


def test_an_order_of_another_length_is_restored_as_a_copy() -> None:
    class Permuted(Sampler[int]):
        def __init__(self, length: int) -> None:
            self.order, self.numbers = torch.arange(length), np.arange(length)

    saved = sampler_values(Permuted(3))
    sampler = Permuted(2)
    put_back_sampler(sampler, saved)
    sampler.order[0] = sampler.numbers[0] = 9  # such as a shuffle in place
    assert [int(copy[0]) for _, copy in saved.values()] == [0, 0]


def test_generators_in_loader_processes_are_named(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loader() -> DataLoader[Any]:
        return numbers([Noise(random.Random(1))], num_workers=1)

    for steps, warned in ((4, False), (6, True)):
        train(loader(), save=own_folder / "one.ckpt", max_steps=steps)
        capsys.readouterr()
        train(loader(), own_folder / "one.ckpt", max_steps=steps + 1)
        assert ("of the dataset (Numbers.transforms.0.generator)" in capsys.readouterr().out) is warned


def test_global_generators_and_samples_are_not_searched() -> None:
    data = Numbers([Noise(torch.default_generator), random.SystemRandom(), *map(Noise, generators().values())])
    data.samples = [random.Random(1)] * 1000  # type: ignore[attr-defined]
    assert list(find_generators(data, "data")) == [f"data.transforms.{position}.generator" for position in range(2, 9)]


def test_a_sampler_with_another_path_or_class_keeps_its_own_state(own_folder: Path) -> None:
    def trained(sampler: Any, **options: Any) -> list[float]:
        rows = train(numbers(shuffle=False, sampler=sampler), **options)
        return sorted(number for row in rows for number in row[2:])

    trained(Shuffled(random.Random(1), list(range(6))), save=own_folder / "one.ckpt", max_epochs=1)
    other = Shuffled(random.Random(1), list(range(SAMPLES)))
    with pytest.warns(UserWarning, match=f"a Shuffled of 6, which is not restored to the Shuffled of {SAMPLES}"):
        longer = trained(other, ckpt=own_folder / "one.ckpt", max_epochs=2)
    assert longer == list(range(SAMPLES))
    array = Shuffled(np.random.default_rng(1), np.arange(6))
    before = sampler_values(array)
    put_back_sampler(array, {path: ("another kind", value) for path, (_, value) in before.items()})
    assert repr(sampler_values(array)) == repr(before)
