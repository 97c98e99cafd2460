"""Modules with the hyperparameters of a configuration, and optimizers that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fabricx as fx
from fabricx.checkpoint.hyperparameters import INSTANTIATOR
from fabricx.cli.lightning.objects import ConfiguredOptimizers, Instantiator, class_of, instantiate_class


class _Inner(fx.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()


class _Net(fx.Module):
    def __init__(self, activation: nn.Module, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = _Inner(width=5)
        self.layer = nn.Linear(width, 1)


_RELU = {"class_path": "torch.nn.ReLU", "init_args": {"inplace": False}}


def test_hyperparameters_are_the_values_of_the_configuration() -> None:
    create = Instantiator(lambda: {"model": {"activation": _RELU, "width": None}}, "model")
    net = create(_Net, nn.ReLU(), 7, applied_instantiation_links={"model.width": 7, "data.width": 8})
    origin = net.hparams.pop(INSTANTIATOR)
    assert net.hparams == {"activation": _RELU, "width": 7}
    assert origin.endswith("instantiate_module")
    assert net.inner.hparams == {"width": 5}  # of the nested constructor
    assert _Net(nn.ReLU()).hparams.keys() == {"activation", "width"}


def test_a_selected_class_is_a_hyperparameter() -> None:
    configuration = {"class_path": "a.Net", "init_args": {"activation": _RELU}, "dict_kwargs": {"width": 3}}
    net = Instantiator(lambda: {"model": configuration}, "model")(_Net, nn.ReLU(), 3, applied_instantiation_links={})
    assert {"_class_path": "a.Net", "activation": _RELU, "width": 3}.items() <= net.hparams.items()


def test_ignored_values_are_not_saved() -> None:
    class Some(fx.Module):
        def __init__(self, activation: nn.Module, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("width")

    values = {"model": {"activation": _RELU, "width": 3}}
    some = Instantiator(lambda: values, "model")(Some, nn.ReLU(), 3, applied_instantiation_links={})
    assert some.hparams == {"width": 3}


def test_optimizers_are_created_anew_for_each_fit() -> None:
    layer = nn.Linear(1, 1)

    def configure(module: Any, optimizer: Any, lr_scheduler: Any) -> Any:
        return module, optimizer, lr_scheduler

    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    step = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    configured = ConfiguredOptimizers(layer, configure, sgd, step)
    (module, first, schedule), (_, second, _) = configured(), configured()
    assert module is layer
    assert first is not second
    assert first.param_groups[0]["params"] == list(layer.parameters())
    assert schedule.step_size == 3
    assert ConfiguredOptimizers(layer, configure, sgd, {})()[2] is None


def test_a_class_is_created_and_the_return_type_of_a_function_is_resolved() -> None:
    assert instantiate_class((2, 3), {"class_path": "torch.nn.Linear", "init_args": {"bias": False}}).bias is None
    assert isinstance(instantiate_class(2, {"class_path": "torch.nn.Flatten"}), nn.Flatten)

    def build(size: int) -> torch.nn.Linear: ...  # type: ignore[empty-body]

    builder: Callable[..., Any] = build
    assert class_of(builder) is nn.Linear
    assert class_of(nn.ReLU) is nn.ReLU
