"""Hooks of Lightning 1, and names similar to a method of the contract, are reported instead of silently ignored."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint, TQDMProgressBar
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import FORMER_DATA_HOOKS, FORMER_HOOKS
from fabricx.core.hook_calls.hooks import CALLBACK_HOOKS, MODULE_HOOKS, check_hooks
from fabricx.testing import TinyModule, tiny_loader


def _with(base: type, name: str) -> Any:
    return type("Net", (base,), {name: lambda self, *args: None})()


@pytest.mark.parametrize("name", FORMER_HOOKS)
@pytest.mark.parametrize("base", [TinyModule, Callback])
def test_a_hook_of_lightning_1_names_its_successor(name: str, base: type) -> None:
    with pytest.raises(ValueError, match=f"Net.{name} would never be called. Its successor is "):
        check_hooks(_with(base, name))


def test_former_hooks_are_not_hooks_and_their_successors_are() -> None:
    assert not set(FORMER_HOOKS) & (CALLBACK_HOOKS | MODULE_HOOKS)
    for successor in FORMER_HOOKS.values():
        for word in successor.replace("(", " ").replace(",", " ").replace(":", " ").split():
            assert not word.startswith("on_") or word in CALLBACK_HOOKS | MODULE_HOOKS, word


class ExportsBest(ModelCheckpoint):
    def _update_best_and_save(self, current: Any, trainer: Any, monitor_candidates: Any) -> None:
        super()._update_best_and_save(current, trainer, monitor_candidates)  # type: ignore[misc]


class OverridesSave(ModelCheckpoint):
    """Calls a method with the name of a method of Lightning's callback."""

    def _save_checkpoint(self, path: str) -> None: ...

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._save_checkpoint("weights.pt")
        super().on_train_end(trainer, module)


def test_a_method_of_lightnings_callback_that_is_never_called_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ExportsBest._update_best_and_save would never be called.*best_model_path"):
        fx.Trainer(callbacks=[ExportsBest()], logger=False)
    check_hooks(OverridesSave())
    check_hooks(ModelCheckpoint())


def test_a_progress_bar_with_methods_of_lightnings_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"Net.init_train_tqdm would never be called"):
        check_hooks(_with(TQDMProgressBar, "init_train_tqdm"))


@pytest.mark.parametrize("name", FORMER_DATA_HOOKS)
def test_a_hook_that_a_data_module_does_not_have_names_its_successor(name: str) -> None:
    with pytest.raises(ValueError, match=f"Net.{name} would never be called. Its successor is "):
        check_hooks(_with(fx.DataModule, name))


def test_fit_refuses_former_names_before_training(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"training_epoch_end.*on_train_epoch_end\(self\)"):
        fx.Trainer(**quiet).fit(_with(TinyModule, "training_epoch_end"), tiny_loader())
    with pytest.raises(ValueError, match="no data"), pytest.warns(UserWarning, match="on_train_start is never"):
        fx.Trainer(**quiet).fit(TinyModule(), datamodule=_with(fx.DataModule, "on_train_start"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("validaton_step", "validation_step"), ("val_step", "validation_step"),
        ("val_dataloaders", "val_dataloader"), ("configure_callback", "configure_callbacks"),
    ],
)  # fmt: skip
def test_a_name_similar_to_a_method_that_is_missing_is_a_warning(name: str, meant: str) -> None:
    class Bare(fx.Module):
        def training_step(self, batch: Any) -> None: ...

    with pytest.warns(UserWarning, match=f"Net.{name} is not called by the Trainer: rename it to {meant}"):
        check_hooks(_with(Bare, name))


def test_methods_of_users_are_accepted() -> None:
    class Net(TinyModule):
        def validation_step(self, batch: Any) -> None:
            self.val_step(batch)

        def val_step(self, batch: Any) -> None: ...

        def encode(self, batch: Any, hiddens: Any) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_hooks(Net())
        check_hooks(_with(Callback, "val_step"))


def test_a_method_that_a_hook_of_the_object_calls_needs_no_hook_of_its_name() -> None:
    class Calls(TinyModule):
        def on_validation_epoch_end(self) -> None:
            self.validation_epoch_end([])
            self.on_my_way()

        def validation_epoch_end(self, outputs: Any) -> None: ...

        def on_my_way(self) -> None: ...

    class CallsInTest(TinyModule):
        def on_test_epoch_end(self) -> None:
            self.validation_epoch_end([])

        def validation_epoch_end(self, outputs: Any) -> None: ...

    class Repeats(TinyModule):
        def validation_epoch_end(self, outputs: Any) -> None:
            super().validation_epoch_end(outputs)  # type: ignore[misc]

    check_hooks(Calls())
    for module in (CallsInTest(), Repeats()):
        with pytest.raises(ValueError, match="would never be called"):
            check_hooks(module)


def test_a_default_of_optimizer_idx_matters_in_training_only() -> None:
    check_hooks(type("Net", (TinyModule,), {"validation_step": lambda self, batch, batch_idx, optimizer_idx=0: None})())
    with pytest.raises(ValueError, match="optimizer_idx"):
        check_hooks(
            type("Net", (TinyModule,), {"training_step": lambda self, batch, batch_idx, optimizer_idx=0: None})()
        )
