"""Loaders that the methods of a module or a data module create."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader
from tests.soak import params
from tests.unit.trainer.counting import Counts


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
