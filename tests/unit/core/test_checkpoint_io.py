"""Lightning's plugin for reading checkpoints: the user's class decides how a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.core.checkpoint_io import TorchCheckpointIO, reader_among
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Loss:
    """An object of a user's class."""


class Allows(TorchCheckpointIO):
    """Reads objects of a single class, and has Lightning's former signature."""

    read: int = 0

    def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:  # type: ignore[override]
        Allows.read += 1
        with torch.serialization.safe_globals([Loss]):
            return super().load_checkpoint(path, map_location)


class Writes(TorchCheckpointIO):
    """Writes in a custom format."""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        pass


class Net(TinyModule):
    """Adds an object to checkpoints."""

    single_file_checkpoints = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = Loss()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loss = checkpoint["loss"]


def test_a_run_reads_its_checkpoint_with_the_plugin(own_folder: Path) -> None:
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), tiny_loader())
    trainer.save_checkpoint("a.ckpt")
    again, plugin = Net(), Allows()
    resumed = fx.Trainer(max_epochs=2, plugins=[plugin], **QUIET)
    assert resumed.checkpoint_io is plugin
    resumed.fit(again, tiny_loader(), ckpt_path="a.ckpt")
    assert type(again.loss) is Loss
    assert (resumed.current_epoch, Allows.read) == (2, 1)


def test_only_a_plugin_that_reads_is_accepted() -> None:
    plugin, other = Allows(), Allows()
    assert reader_among([plugin, other]) == (plugin, [other])
    assert reader_among(None) == reader_among([]) == (None, [])
    assert reader_among(plugin) == (plugin, [])
    for refused in (Writes(), object()):
        with pytest.raises(ValueError, match="may override load_checkpoint only"):
            fx.Trainer(plugins=[refused], **QUIET)


def test_its_methods_can_be_called_without_a_trainer(tmp_path: Path) -> None:
    plugin, path = TorchCheckpointIO(), tmp_path / "a.ckpt"
    plugin.save_checkpoint({"loss": Loss()}, path)
    with pytest.raises(Exception, match="Loss"):
        plugin.load_checkpoint(path)
    assert type(plugin.load_checkpoint(path, weights_only=False)["loss"]) is Loss
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert not path.exists()
