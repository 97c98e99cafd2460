"""Loaders of a run on a single rank: batches, limits, estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import GradientAccumulation
from fabricx.data.run_data import _check_part
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader
from tests.unit.trainer.counting import Counts, fitted


class Plans(TinyModule):
    """Records the number of updates for which a schedule is planned."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer is not None
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_schedule_is_planned_for_the_updates_of_the_run_on_any_number_of_ranks(own_folder: Path) -> None:
    def plan(began: int, ckpt: Path | None = None) -> fx.Trainer:
        trainer = fx.Trainer(max_epochs=2, max_steps=-1 if ckpt else 1, **QUIET)
        trainer.state.ranks = began
        module = Plans()
        trainer.fit(module, DataLoader(tiny_loader().dataset, batch_size=2), ckpt_path=ckpt)
        assert ckpt is None or module.planned == 8  # 16 samples, of 4 a global batch, twice
        return trainer

    plan(2).save_checkpoint(own_folder / "of two ranks.ckpt")
    resumed = plan(0, own_folder / "of two ranks.ckpt")
    assert resumed.global_step == 8


def test_a_schedule_is_planned_for_the_accumulation_of_each_epoch() -> None:
    module, trainer = Plans(), fx.Trainer(max_epochs=3, callbacks=GradientAccumulation({1: 4, 2: 3}), **QUIET)
    trainer.fit(module, DataLoader(tiny_loader().dataset, batch_size=2))
    assert module.planned == trainer.global_step == 8 + 2 + 3  # 8 batches in an epoch


class _PlansEarly(Counts):
    """Plans in `setup`, before the data is loaded, and in the method that returns the loader."""

    early: int | float = 0
    within: int | float = 0
    created = 0

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if stage == "fit":
            self.early = self.trainer.estimated_stepping_batches
            self.generator = torch.Generator()  # set although it is newer than the loader

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.created, self.within = self.created + 1, self.trainer.estimated_stepping_batches
        return tiny_loader(shuffle=True)


def test_a_schedule_may_be_planned_in_setup_before_the_data_is_loaded() -> None:
    module, plain, order = _PlansEarly(), Counts(), []
    for candidate in (module, plain):
        fx.seed_everything(3)
        trainer = fx.Trainer(max_epochs=3, accumulate_grad_batches=3, **QUIET)
        trainer.fit(candidate, None if candidate is module else tiny_loader(shuffle=True))
        order.append(torch.cat(candidate.seen["train"]))
    assert module.early == trainer.global_step == trainer.estimated_stepping_batches == 6
    assert module.within == float("inf")  # the loader does not exist yet
    assert module.created == 1
    assert torch.equal(*order)
    longer = fx.Trainer(max_epochs=2, limit_train_batches=2, **QUIET)
    longer.fit(module)
    assert module.early == longer.global_step == 4  # not the number of the previous run
    with pytest.raises(ValueError, match="there is no batch to train on"):
        fx.Trainer(max_epochs=1, **QUIET).fit(module, tiny_loader(samples=0))


def test_limits_count_batches_or_parts() -> None:
    module, trainer = fitted(
        limit_train_batches=0.5, limit_val_batches=1, limit_test_batches=3, limit_predict_batches=0.25
    )
    trainer.test(module, tiny_loader(), verbose=False)
    trainer.predict(module, tiny_loader())
    assert module.counts() == {"train": 4, "validation": 2, "test": 3, "predict": 1}


@pytest.mark.parametrize(("fraction", "validation"), [(2, 2), (0.5, 3)])
def test_overfit_batches_reads_the_first_batches_of_each_loader_in_each_epoch(fraction: float, validation: int) -> None:
    module, val = Counts(), tiny_loader(samples=24, shuffle=True)
    trainer = fx.Trainer(max_epochs=3, overfit_batches=fraction, num_sanity_val_steps=0, **QUIET)
    with pytest.warns(UserWarning, match="a loader with shuffle=True is not shuffled"):
        trainer.fit(module, tiny_loader(shuffle=True), val)
    epochs = [torch.cat(module.seen["train"][at : at + 2]) for at in (0, 2, 4)]
    assert torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])
    assert (trainer.num_training_batches, trainer.num_val_batches) == (2, [validation])
    rounds = [torch.cat(module.seen["validation"][at : at + validation]) for at in (0, validation)]
    assert torch.equal(*rounds)


def test_the_sanity_check_has_no_more_batches_than_a_validation() -> None:
    module = Counts()
    fx.Trainer(max_epochs=1, limit_val_batches=0.25, limit_train_batches=1, **QUIET).fit(
        module, tiny_loader(), tiny_loader()
    )
    assert len(module.seen["validation"]) == 1 + 1


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({}, {"samples": 0}, "there is no batch to train on: DataLoader is empty"),
        ({}, {"samples": 3, "drop_last": True}, "drop_last=True"),
        ({"limit_train_batches": 0.01}, {}, "limit_train_batches=0.01 of 4 batches is less than one"),
        ({"overfit_batches": 0.01}, {}, "overfit_batches=0.01 of 4 batches is less than one"),
        ({"limit_val_batches": 0.01}, {}, "limit_val_batches=0.01 of 4 batches is less than one"),
    ],
)
def test_a_training_without_batches_is_an_error(options: dict[str, Any], data: dict[str, Any], message: str) -> None:
    trainer = fx.Trainer(max_epochs=1, **QUIET, **options)
    whole: Any = tiny_loader().dataset
    kept = torch.utils.data.Subset(whole, range(data.pop("samples", len(whole))))
    with pytest.raises(ValueError, match=message):
        trainer.fit(Counts(), torch.utils.data.DataLoader(kept, batch_size=4, **data), tiny_loader())
    none = fx.Trainer(max_epochs=1, limit_train_batches=0, val_check_interval=2, **QUIET)
    none.fit(Counts(), tiny_loader(), tiny_loader())  # no batch was requested


def test_a_fraction_of_the_batches_is_divided_over_ranks() -> None:
    loader = tiny_loader(8)
    _check_part("limit_val_batches", 0.5, loader, 1, 2)
    message = (
        r"limit_val_batches=0\.4 of 2 batches, divided over 2 ranks, is less than one each: set a number of batches"
    )
    with pytest.raises(ValueError, match=message):
        _check_part("limit_val_batches", 0.4, loader, 0, 2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([*tiny_data(8)])


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_fraction_of_a_stream_is_an_error_unless_it_is_0(stage: str, quiet: dict[str, Any]) -> None:
    stream: Any = DataLoader(Stream(), batch_size=2)
    data = {"train_dataloaders": tiny_loader(), "val_dataloaders": tiny_loader(), f"{stage}_dataloaders": stream}
    limit: dict[str, Any] = {f"limit_{stage}_batches": 0.5}
    with pytest.raises(ValueError, match=r"fraction of the batches \(0.5\) needs a loader with a length"):
        fx.Trainer(max_epochs=1, **limit, **quiet).fit(TinyModule(), **data)
    nothing: dict[str, Any] = {f"limit_{stage}_batches": 0.0}
    fx.Trainer(max_epochs=1, **nothing, **quiet).fit(TinyModule(), **data)


def test_a_validation_that_is_off_creates_no_loader() -> None:
    created = []

    class Validates(TinyModule):
        def val_dataloader(self) -> Any:
            created.append(1)
            return tiny_loader()

    module = Validates()
    trainer = fx.Trainer(max_epochs=1, limit_val_batches=0, **QUIET)
    trainer.fit(module, tiny_loader())
    assert not created
    assert trainer.num_val_batches == []
    module.validation_step = None  # type: ignore[method-assign, assignment]
    with pytest.warns(UserWarning, match="validation_step"):
        fx.Trainer(max_epochs=1, **QUIET).fit(module, tiny_loader())


def test_a_loader_whose_length_is_not_implemented_is_a_stream() -> None:
    class Loader:
        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Any:
            return iter(tiny_loader())

    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(TinyModule(), Loader())
    assert (trainer.num_training_batches, trainer.global_step) == (float("inf"), 4)
    with pytest.raises(ValueError, match="needs a loader with a length"):
        fx.Trainer(max_epochs=1, limit_train_batches=0.5, **QUIET).fit(TinyModule(), Loader())
