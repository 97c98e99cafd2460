"""The table of Lightning's names: complete, correct, and equal to docs/lightning.md."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

import fabricx as fx
import fabricx.pytorch as ours
from fabricx.pytorch.documentation import ABSENT_MEMBERS
from fabricx.pytorch.modules import available, lookup
from fabricx.pytorch.names import FORMER, TREE, names_of
from fabricx.testing import QUIET

theirs: Any = pytest.importorskip("lightning.pytorch")


def public(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("path", [path for path, names in TREE.items() if names.names or names.source])
def test_each_name_is_an_object_of_fabricx(path: str) -> None:
    for name in TREE[path].names:
        assert lookup(path, name) is not None


@pytest.mark.parametrize("path", [path for path, names in TREE.items() if names.absent])
def test_the_use_of_each_absent_name_is_an_import_error_with_a_successor(path: str) -> None:
    modules = [path, *(f"{path}.{below}" for below in TREE[path].paths.split())]
    for name in set(TREE[path].absent) - set(available(path)):
        with pytest.raises(ImportError, match=f"fabricx has no .*{name}.*: ."):
            lookup(path, name)()
        if name in FORMER:  # these can't be imported either
            assert not any(hasattr(_theirs(module), name) for module in modules), name


def _theirs(path: str) -> Any:
    try:
        return importlib.import_module(f"lightning.pytorch.{path}".rstrip("."))
    except ImportError:
        return None


@pytest.mark.parametrize(
    "path",
    [
        "", "callbacks", "loggers", "utilities", "utilities.rank_zero", "utilities.seed", "strategies", "tuner",
        "profilers", "plugins", "plugins.environments", "accelerators", "core", "trainer", "trainer.states",
        "utilities.grads", "utilities.combined_loader", "utilities.memory", "utilities.model_summary", "cli",
    ],
)  # fmt: skip
def test_each_public_name_of_lightning_is_an_object_or_has_a_successor(path: str) -> None:
    if path == "cli":
        pytest.importorskip("jsonargparse")
    module = importlib.import_module(f"lightning.pytorch.{path}".rstrip("."))
    for name in public(module):
        try:
            lookup(path, name)
        except ImportError as error:
            assert "fabricx has no" in str(error), f"{path}.{name}"  # noqa: PT017


@pytest.mark.parametrize("path", ["", "callbacks", "loggers", "tuner"])
def test_positional_arguments_have_the_order_of_lightning(path: str) -> None:
    module = importlib.import_module(f"lightning.pytorch.{path}".rstrip("."))
    for name in public(module):
        their_class = getattr(module, name)
        if not isinstance(their_class, type) or name not in available(path) or name == "Trainer":
            continue
        our_class: Any = lookup(path, name)
        order, expected = (_positional(c.__init__) for c in (our_class, their_class))
        common = min(len(order), len(expected))
        assert order[:common] == expected[:common], name


def _positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def test_each_lightning_path_within_a_supported_package_is_resolved() -> None:
    for package in ("callbacks", "loggers", "strategies", "profilers", "tuner", "trainer", "core"):
        folder = importlib.import_module(f"lightning.pytorch.{package}").__path__
        for module_info in pkgutil.iter_modules(folder):
            path = f"{package}.{module_info.name}"
            known = names_of(path) is not None
            private = {
                "core.saving", "trainer.call", "trainer.configuration_validator", "trainer.connectors", "trainer.setup",
                "strategies.launchers", "strategies.single_xla", "strategies.xla", "profilers.xla",
            }  # fmt: skip
            assert known or path in private, path


CLASSES = {
    "Trainer": fx.Trainer,
    "LightningModule": fx.Module,
    "LightningDataModule": fx.DataModule,
    "Callback": fx.Callback,
}


def members(cls: type) -> set[str]:
    inherited = set(dir(torch.nn.Module)) | set(dir(object))
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith(("lightning", "fabricx"))]
    named = {name for owner in owners for name in vars(owner) if not name.startswith("_") and not name.isupper()}
    return named - inherited


@pytest.mark.parametrize("name", CLASSES)
def test_each_member_of_lightnings_classes_exists_or_has_a_successor(name: str) -> None:
    steps = {"training_step", "validation_step", "test_step"}
    of_object = set(vars(fx.Trainer(**QUIET))) if name == "Trainer" else steps
    missing = {member for member in members(getattr(theirs, name)) if not hasattr(CLASSES[name], member)}
    assert missing - of_object <= set(ABSENT_MEMBERS[name]), missing - of_object
    assert not {member for member in ABSENT_MEMBERS[name] if hasattr(CLASSES[name], member)}


def test_fabricxs_trainer_has_each_argument_of_lightnings() -> None:
    arguments = set(inspect.signature(theirs.Trainer.__init__).parameters) - {"self"}
    assert arguments - set(inspect.signature(fx.Trainer.__init__).parameters) == {"model_registry"}


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict", "save_checkpoint"])
def test_calls_have_the_order_of_lightnings_arguments(call: str) -> None:
    expected = list(inspect.signature(getattr(theirs.Trainer, call)).parameters)
    here = list(inspect.signature(getattr(fx.Trainer, call)).parameters)
    if call == "save_checkpoint":
        expected = expected[:3]
        assert here[2] == expected[2] == "weights_only"
        return
    assert here[: len(expected)] == expected


@pytest.mark.parametrize("name", ["log", "log_dict", "all_gather", "manual_backward", "clip_gradients", "optimizers"])
def test_methods_of_a_module_have_lightnings_arguments_in_the_same_order(name: str) -> None:
    expected = list(inspect.signature(getattr(theirs.LightningModule, name)).parameters)
    here = list(inspect.signature(getattr(fx.Module, name)).parameters)
    if name == "log_dict":
        assert here[:2] == expected[:2]
    elif name == "all_gather":
        assert set(here) <= set(expected)
    else:
        assert here == expected


HOOKS = [name for name in vars(theirs.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


@pytest.mark.parametrize(
    "name", ["Callback", "BasePredictionWriter", "EarlyStopping", "ModelCheckpoint", "TQDMProgressBar"]
)
def test_hooks_may_be_called_by_the_keywords_of_lightning(name: str) -> None:
    our_class, their_class = lookup("callbacks", name), getattr(theirs.callbacks, name)
    for hook in HOOKS:
        expected = inspect.signature(getattr(theirs.Callback, hook)).parameters
        here = inspect.signature(getattr(our_class, hook)).parameters
        assert list(here)[: len(expected)] == list(expected), hook
    for method in {"write_on_batch_end", "write_on_epoch_end", "get_metrics"} & set(dir(their_class)):
        expected = inspect.signature(getattr(their_class, method)).parameters
        assert list(inspect.signature(getattr(our_class, method)).parameters) == list(expected), method


def test_the_module_has_lightnings_version() -> None:
    assert ours.__version__.split(".")[0] == theirs.__version__.split(".")[0]
