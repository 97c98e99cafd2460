from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import fabricx as fx
from fabricx.errors import PossibleUserWarning
from fabricx.loggers import CSVLogger
from fabricx.testing import TinyModule, tiny_loader


class OnlyTrains(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tiny = TinyModule()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.tiny(batch[0]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.tiny.configure_optimizers()


@pytest.fixture(autouse=True)
def advice_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PossibleUserWarning)
        yield


def fit(quiet: dict[str, Any], module: fx.Module, val: Any = None, **options: Any) -> None:
    fx.Trainer(max_epochs=1, **{**quiet, **options}).fit(module, tiny_loader(), val)


def test_a_validation_that_never_runs_is_a_warning(quiet: dict[str, Any]) -> None:
    with pytest.warns(PossibleUserWarning, match="has a validation_step, and there is no val_dataloader"):
        fit(quiet, TinyModule())
    with pytest.warns(PossibleUserWarning, match="there is a val_dataloader, and the module has no validation_step"):
        fit(quiet, OnlyTrains(), tiny_loader())
    fit(quiet, TinyModule(), limit_val_batches=0)
    fit(quiet, OnlyTrains())
    fit(quiet, OnlyTrains(), overfit_batches=1)


def test_shuffled_evaluation_data_are_a_warning(quiet: dict[str, Any]) -> None:
    with pytest.warns(PossibleUserWarning, match="the val_dataloader shuffles"):
        fit(quiet, TinyModule(), [tiny_loader(), tiny_loader(shuffle=True)])
    with pytest.warns(PossibleUserWarning, match="the test_dataloader shuffles"):
        fx.Trainer(**quiet).test(TinyModule(), tiny_loader(shuffle=True), verbose=False)
    fit(quiet, TinyModule(), tiny_loader())


def test_a_default_length_of_training_is_a_warning(quiet: dict[str, Any]) -> None:
    with pytest.warns(PossibleUserWarning, match="max_epochs is not set: training ends after 1000 epochs"):
        fx.Trainer(callbacks=[OneStep()], **quiet).fit(OnlyTrains(), tiny_loader())
    fx.Trainer(max_steps=1, **quiet).fit(OnlyTrains(), tiny_loader())


class OneStep(fx.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = True


def test_rows_that_no_logger_receives_are_a_warning(quiet: dict[str, Any]) -> None:
    with pytest.warns(PossibleUserWarning, match=r"training batches \(4\) is smaller than log_every_n_steps=50"):
        fit(quiet, OnlyTrains(), logger=CSVLogger())
    fit(quiet, OnlyTrains(), logger=CSVLogger(), log_every_n_steps=4)
    fit(quiet, OnlyTrains())
