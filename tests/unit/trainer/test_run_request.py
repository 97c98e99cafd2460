"""A call that cannot work is an error before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.testing import QUIET, TinyModule, tiny_loader
from fabricx.trainer.run_request import Job, check_callbacks, check_job


def check(stage: str, module: Any, train: Any = None, evaluate: Any = None, data: Any = None, **options: Any) -> None:
    trainer, job = fx.Trainer(**{**QUIET, **options}), Job(stage, module, train, evaluate, data, None)
    check_job(job)
    check_callbacks(trainer, job)


class Misspelt(fx.Module):
    def trainig_step(self, batch: Any) -> None: ...


class HasLoaders(TinyModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()


class WithoutLoader(HasLoaders):
    train_dataloader: Any = None


class Data(fx.DataModule):
    def val_dataloader(self) -> Any:
        return tiny_loader()


@pytest.mark.parametrize(
    ("stage", "module", "message"),
    [
        ("fit", nn.Linear(1, 1), r"trainer.fit\(Linear\): the first argument is the module"),
        ("fit", TinyModule, "pass an object of it"),
        ("fit", Misspelt(), r"Misspelt has no training_step, which trainer.fit calls.*Did you mean 'trainig_step'"),
        ("validate", fx.Module(), "Module has no validation_step, which trainer.validate calls: define it.$"),
        ("fit", TinyModule(), r"trainer.fit has no data: pass train_dataloaders=.*define TinyModule.train_dataloader"),
        ("fit", WithoutLoader(), r"trainer.fit has no data: .*define WithoutLoader.train_dataloader"),
        ("test", HasLoaders(), r"trainer.test has no data: pass dataloaders=.*define HasLoaders.test_dataloader"),
    ],
)
def test_a_call_without_a_step_or_data_names_what_is_missing(stage: str, module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(stage, module)


def test_data_are_accepted_from_the_call_the_module_or_the_data_module() -> None:
    check("fit", HasLoaders())
    check("fit", TinyModule(), train=tiny_loader())
    check("validate", TinyModule(), data=Data())
    check("predict", TinyModule(), evaluate=tiny_loader())


def test_callbacks_check_a_fit_with_the_samples_of_its_global_batch() -> None:
    seen: list[Any] = []

    class Checks(Callback):
        def check_fit(self, trainer: Any, module: Any, global_batch: int | None) -> None:
            seen.append(global_batch)

    check("fit", TinyModule(), train=tiny_loader(16, 4), devices=3, callbacks=[Checks()])
    check("fit", HasLoaders(), callbacks=[Checks()])
    check("validate", TinyModule(), evaluate=tiny_loader(), callbacks=[Checks()])
    assert seen == [12, None]


def test_a_module_without_optimizers_returns_none_from_configure_optimizers() -> None:
    class WithoutOptimizer(fx.Module):
        def training_step(self, batch: Any) -> torch.Tensor:
            return torch.zeros(())

    for module in (WithoutOptimizer(), TinyModule()):
        if isinstance(module, TinyModule):
            module.configure_optimizers = None  # type: ignore[method-assign, assignment]
        with pytest.raises(ValueError, match="has no configure_optimizers, so no weight would be trained"):
            check("fit", module, train=tiny_loader())
    manual = WithoutOptimizer()
    manual.automatic_optimization = False
    check("fit", manual, train=tiny_loader())


class Trains(fx.DataModule):
    def train_dataloader(self) -> Any:
        return tiny_loader()


class Unfinished(TinyModule):
    def __init__(self) -> None:
        self.rate = 0.1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ((Unfinished(), tiny_loader()), r"Unfinished.__init__ has not called super\(\).__init__\(\)"),
        ((TinyModule, tiny_loader()), r"trainer.fit got the class TinyModule: pass an object of it, TinyModule\(...\)"),
        ((TinyModule(), Trains), "got the class Trains"),
        ((tiny_loader(), TinyModule()), r"trainer.fit\(DataLoader\): the first argument is the module"),
        ((TinyModule(), tiny_loader(), Trains()), "there are loaders and a data module"),
        ((TinyModule(), tiny_loader(), None, Trains()), "there are loaders and a data module"),
        ((TinyModule(), torch.ones(4, 4)), "Tensor is a batch: pass a DataLoader"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(argument: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fx.Trainer(max_epochs=1, **QUIET).fit(*argument)


def test_a_prediction_without_a_step_and_a_forward_is_refused() -> None:
    class Empty(fx.Module): ...

    with pytest.raises(ValueError, match="Empty has neither predict_step nor forward"):
        fx.Trainer(**QUIET).predict(Empty(), tiny_loader())


class OwnLoader(TinyModule):
    def train_dataloader(self, paths: Any) -> Any: ...


class OwnMethods(OwnLoader):
    """Has unrelated methods with names that the Trainer calls in other runs."""

    def predict_step(self, text: str, tokenizer: Any, length: int, device: str) -> None: ...

    def predict_dataloader(self, dataset: Any, batch_size: int | None = None) -> Any: ...


def test_parameters_of_a_method_that_the_run_does_not_call_are_a_warning() -> None:
    def warned(stage: str, **data: Any) -> list[str]:
        with pytest.warns(UserWarning, match=r"this run does not call it") as caught:
            check(stage, OwnMethods(), **data)
        return [str(warning.message).split()[0].partition(".")[2] for warning in caught]

    assert warned("fit", train=tiny_loader()) == ["predict_step", "predict_dataloader", "train_dataloader"]
    assert warned("validate", evaluate=tiny_loader()) == ["predict_step", "predict_dataloader", "train_dataloader"]
    with pytest.raises(ValueError, match="predict_step has the required parameter 'device'"):
        check("predict", OwnMethods(), evaluate=tiny_loader())


def test_parameters_of_a_method_for_loaders_are_an_error_if_the_run_calls_it() -> None:
    with pytest.raises(ValueError, match="train_dataloader has the required parameter 'paths'"):
        check("fit", OwnLoader())


def test_loaders_of_a_data_module_replace_those_of_the_module() -> None:
    class Loaders(fx.DataModule):
        def train_dataloader(self) -> Any:
            return tiny_loader()

    with pytest.warns(UserWarning, match=r"train_dataloader.*this run does not call it"):
        check("fit", OwnLoader(), data=Loaders())


def test_errors_of_wrong_arguments_have_lightnings_exception_types() -> None:
    module, data = TinyModule(), tiny_loader()
    for stage in ("fit", "validate", "test", "predict"):
        with pytest.raises(TypeError, match="has no data"):
            check(stage, module)
    for wrong in (torch.nn.Linear(1, 1), TinyModule, None):
        with pytest.raises(TypeError, match=r"module|TinyModule"):
            fx.Trainer(max_epochs=1, **QUIET).fit(wrong, data)  # type: ignore[arg-type]
    trains = TinyModule()
    trains.train_dataloader = lambda: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="returned None"):
        fx.Trainer(max_epochs=1, **QUIET).fit(trains)
    with pytest.raises(TypeError, match="int is not iterable"):
        fx.Trainer(max_epochs=1, **QUIET).fit(module, 5)
    with pytest.raises(TypeError, match="str is text: pass a DataLoader"):
        fx.Trainer(max_epochs=1, **QUIET).fit(module, "data.csv")


@pytest.mark.parametrize("base", [fx.Module, fx.LightningModule])
def test_a_prediction_needs_a_step_or_a_forward_in_each_class_of_modules(base: type[fx.Module]) -> None:
    without = type("Without", (base,), {})()
    with pytest.raises(ValueError, match="Without has neither predict_step nor forward"):
        check("predict", without, evaluate=tiny_loader())
    module = TinyModule()
    module.predict_step = None  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="TinyModule has neither predict_step nor forward"):
        check("predict", module, evaluate=tiny_loader())
