"""Options of a module from the hyperparameters of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.cli.lightning.checkpoints import hparams_of

RELU = {"class_path": "torch.nn.ReLU", "init_args": {}}


class Net(fx.Module):
    def __init__(self, activation: nn.Module, width: int = 2) -> None:
        super().__init__()


class Wide(Net):
    pass


def _checkpoint(folder: Path, **hparams: Any) -> str:
    path = folder / "a.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": hparams, "pytorch-lightning_version": "2.6.6"}, path)
    return str(path)


def test_checkpoint_values_are_options_of_the_module(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, width=3, _instantiator="lightning.pytorch.cli.instantiate_module")
    assert hparams_of(path, Net, None, trusted=False) == {"width": 3}
    assert hparams_of(_checkpoint(tmp_path), Net, None, trusted=False) == {}


def test_classes_of_the_configuration_are_used_unless_the_checkpoint_is_trusted(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, activation=RELU, width=3)
    model = SimpleNamespace(as_dict=lambda: {"activation": {"class_path": "torch.nn.ReLU"}})
    assert hparams_of(path, Net, model, trusted=False) == {"activation": RELU, "width": 3}
    assert hparams_of(path, Net, {"activation": None}, trusted=True)["activation"] == RELU
    with pytest.raises(fx.errors.CheckpointError, match=r"torch.nn.ReLU.*--weights_only=false"):
        hparams_of(path, Net, {"activation": None}, trusted=False)


def test_a_selected_class_is_an_imported_one_or_that_of_the_configuration(tmp_path: Path) -> None:
    wide = f"{__name__}.Wide"
    path = _checkpoint(tmp_path, _class_path=wide, width=3)
    expected = {"class_path": wide, "dict_kwargs": {"width": 3}}
    assert hparams_of(path, Net, None, trusted=False) == expected
    path = _checkpoint(tmp_path, _class_path="elsewhere.Wide", width=3)
    with pytest.raises(fx.errors.CheckpointError, match=r"elsewhere.Wide"):
        hparams_of(path, Net, {"class_path": wide}, trusted=False)
    assert hparams_of(path, Net, {"class_path": "elsewhere.Wide"}, trusted=False)["class_path"] == "elsewhere.Wide"
