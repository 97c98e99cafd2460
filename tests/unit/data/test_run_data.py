"""Loaders of a run on a single rank: batches, limits, estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import GradientAccumulation, ModelCheckpoint
from fabricx.data.run_data import _check_part
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader
from tests.soak import params
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


class _Reloads(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return tiny_loader()


@pytest.mark.parametrize(("every", "asked"), [(0, 1), (1, 4), (2, 2)])
def test_loaders_are_reloaded_every_n_epochs(every: int, asked: int) -> None:
    module = _Reloads()
    fx.Trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every, **QUIET).fit(module)
    assert module.asked == asked


class Grows(IterableDataset[Any]):
    """A stream with a different order and length in each epoch.

    Args:
        epoch: epoch in which the loader was created.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        data = [*tiny_data(8 + 2 * self.epoch)]
        return iter([data[position] for position in torch.randperm(len(data)).tolist()])


class Curriculum(fx.DataModule):
    """Creates loaders that depend on the epoch and on saved state.

    Args:
        kind: "stream" or "shuffled".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.level = kind, 0

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.level = state_dict["level"]

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        if self.kind == "stream":
            return DataLoader(Grows(epoch), batch_size=4)
        return tiny_loader(8 + 2 * epoch + self.level, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        several = [tiny_loader(4 + self.trainer.current_epoch, 4)]
        return several if self.trainer.current_epoch < 2 else several * 2


class Follows(TinyModule):
    def on_train_epoch_end(self) -> None:
        assert self.trainer is not None
        self.trainer.datamodule.level = (self.current_epoch + 1) // 2  # changes where loaders are created

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "every"), params([("stream", 2), ("shuffled", 1)], [("stream", 1), ("shuffled", 2)]))
def test_a_resumed_run_has_the_loaders_that_were_created_during_the_run(
    kind: str, every: int, quiet: dict[str, Any], tmp_path: Path
) -> None:
    def train(folder: Path, ckpt: Path | None = None) -> tuple[list[float], dict[str, float], int]:
        fx.seed_everything(3)
        module, saves = Follows(), ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {**quiet, "max_epochs": 4, "reload_dataloaders_every_n_epochs": every, "enable_checkpointing": True}
        trainer = fx.Trainer(callbacks=[saves], **options)
        trainer.fit(module, datamodule=Curriculum(kind), ckpt_path=ckpt)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return [weight for p in module.parameters() for weight in p.flatten().tolist()], metrics, trainer.global_step

    whole = train(tmp_path / "whole")
    assert any("dataloader_idx" in name for name in whole[1])
    for step in range(1, whole[2]):
        assert train(tmp_path / "resumed", tmp_path / "whole" / f"step={step}.ckpt") == whole, step


def part(number: int) -> Any:
    """Return a loader of 8 of 64 samples."""
    return DataLoader(torch.utils.data.Subset(tiny_data(64), range(8 * number, 8 * number + 8)), 4)


class Draws(fx.DataModule):
    """Its state, or random numbers, decide which samples its loader has.

    Args:
        kind: "level" changes at each batch, "calls" when a loader is created, "drawn" has no state.
        level: first level.
    """

    def __init__(self, kind: str, level: int) -> None:
        super().__init__()
        self.kind, self.level, self.seen = kind, level, torch.zeros(8)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.kind == "drawn" else {"level": self.level, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.level, self.seen = state_dict["level"], state_dict["seen"]

    def train_dataloader(self) -> Any:
        number = int(torch.randint(8, ())) if self.kind == "drawn" else self.level % 8
        self.seen[number] += 1
        self.level += self.kind == "calls"
        return part(number)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.level += self.kind == "level"
        torch.rand(())
        return batch


class FromCheckpoint(TinyModule):
    """The module's own state decides the samples of its loader."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["number"] = self.number

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.number = checkpoint["number"]

    def train_dataloader(self) -> Any:
        return part(self.number)


@pytest.mark.parametrize(
    ("kind", "every", "level"),
    params(
        [("level", 0, 3), ("calls", 2, 0), ("drawn", 2, 0), ("module", 0, 3)],
        [("level", 2, 3), ("level", 1, 3), ("calls", 0, 3), ("drawn", 0, 0), ("module", 2, 3)],
    ),
)
def test_a_resumed_run_creates_loaders_from_the_state_at_their_creation(
    kind: str, every: int, level: int, quiet: dict[str, Any], tmp_path: Path
) -> None:
    def train(folder: Path, level: int, ckpt: Path | None = None) -> tuple[Any, list[float], list[float]]:
        fx.seed_everything(3)
        module = FromCheckpoint(level) if kind == "module" else TinyModule()
        data = None if kind == "module" else Draws(kind, level)
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {**quiet, "max_epochs": 5, "reload_dataloaders_every_n_epochs": every, "enable_checkpointing": True}
        trainer = fx.Trainer(callbacks=[saves], **options)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt)
        state = None if data is None or kind == "drawn" else [data.level, *data.seen.tolist()]
        return state, [weight for p in module.parameters() for weight in p.flatten().tolist()], torch.rand(2).tolist()

    whole = train(tmp_path / "whole", level)
    for step in (1, 3, 5, 6, 8):
        assert train(tmp_path / "resumed", 0, tmp_path / "whole" / f"step={step}.ckpt") == whole, step


class Position(fx.DataModule):
    """Its state is that of a loader, which does not exist before it is created."""

    def train_dataloader(self) -> Any:
        self.loader = part(1)
        self.loader.position = 0
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.loader.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.position = state_dict["position"] + 10


@pytest.mark.parametrize("every", [0, 1])
def test_the_state_of_a_loader_is_loaded_into_the_loader_that_is_read(
    every: int, quiet: dict[str, Any], tmp_path: Path
) -> None:
    data, options = Position(), {**quiet, "reload_dataloaders_every_n_epochs": every}
    trainer = fx.Trainer(max_steps=3, **options)
    trainer.fit(TinyModule(), datamodule=data)
    trainer.save_checkpoint(tmp_path / "third")
    again = fx.Trainer(max_steps=3, **options)
    again.fit(TinyModule(), datamodule=data, ckpt_path=tmp_path / "third")
    assert again.train_dataloader.position == data.loader.position == 10


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


def test_a_loader_method_that_is_set_to_none_is_no_loader(quiet: dict[str, Any]) -> None:
    module = type("Validates", (TinyModule,), {"val_dataloader": lambda self: tiny_loader()})()
    module.val_dataloader = None
    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(module, tiny_loader())
    assert not trainer.enable_validation


@pytest.mark.parametrize("method", ["train_dataloader", "val_dataloader"])
@pytest.mark.parametrize("of_data", [False, True], ids=["module", "data module"])
def test_a_method_that_returns_no_loader_is_an_error(method: str, of_data: bool) -> None:
    owner = type("Forgets", (fx.DataModule if of_data else TinyModule,), {method: lambda self: None})()
    if of_data and method == "val_dataloader":
        owner.train_dataloader = tiny_loader
    module, data = (TinyModule(), owner) if of_data else (owner, None)
    train = None if of_data or method == "train_dataloader" else tiny_loader()
    with pytest.raises(ValueError, match=rf"Forgets.{method}\(\) returned None: return a loader, or \[\] for no "):
        fx.Trainer(max_epochs=1, **QUIET).fit(module, train, datamodule=data)


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
