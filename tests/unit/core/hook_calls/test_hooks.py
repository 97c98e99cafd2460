"""Hooks: their names, and the order of calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import CALLBACK_HOOKS, MODULE_HOOKS, Hooks, call, check_hooks
from fabricx.testing import TinyModule, tiny_loader


def test_callbacks_run_before_the_module_and_metric_callbacks_after_it(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class First(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append("callback")

    class Watching(Callback):
        watches_metrics = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append(f"watching {float(trainer.callback_metrics['late'])}")

    class Net(TinyModule):
        def on_train_epoch_end(self) -> None:
            order.append("module")
            self.log("late", 3.0)

    fx.Trainer(max_epochs=1, callbacks=[Watching(), First()], **quiet).fit(Net(), tiny_loader())
    assert order == ["callback", "module", "watching 3.0"]


def test_on_load_checkpoint_of_the_module_runs_before_callbacks_as_in_lightning() -> None:
    order: list[str] = []

    class Reads(Callback):
        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            order.append("callback")

    class Changes(TinyModule):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            order.append("module")

    for hook in Hooks(None, Changes(), [Reads()]).on_load_checkpoint:  # type: ignore[arg-type]
        hook({})
    assert order == ["module", "callback"]


def test_a_misspelt_hook_is_a_warning_with_the_nearest_name(quiet: dict[str, Any]) -> None:
    class Wrong(Callback):
        def on_train_epoch_edn(self) -> None: ...

    with pytest.warns(UserWarning, match="Did you mean 'on_train_epoch_end'"):
        fx.Trainer(callbacks=[Wrong()], **quiet)


def test_a_hook_of_callbacks_in_a_module_is_a_warning() -> None:
    class Wrong(TinyModule):
        def on_sanity_check_start(self) -> None: ...

    with pytest.warns(UserWarning, match="it is a hook of callbacks"):
        check_hooks(Wrong())


def test_a_hook_without_an_override_has_no_function_to_call() -> None:
    hooks = Hooks(None, TinyModule(), [Callback()])  # type: ignore[arg-type]
    assert all(getattr(hooks, name) == () for name in CALLBACK_HOOKS | MODULE_HOOKS)


def test_a_method_set_on_an_instance_is_a_hook() -> None:
    module, seen = TinyModule(), []
    module.on_fit_start = lambda: seen.append("called")  # type: ignore[method-assign]
    call(Hooks(None, module, []).on_fit_start)  # type: ignore[arg-type]
    assert seen == ["called"]


def test_an_attribute_with_the_name_of_a_hook_is_a_warning_and_is_not_called(quiet: dict[str, Any]) -> None:
    class Flags(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.setup: Any = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.setup = True
            return super().training_step(batch, batch_idx)

    module = Flags()
    with pytest.warns(UserWarning, match=r"Flags.setup is a value, False: the hook setup is not called"):
        fx.Trainer(max_steps=1, **quiet).fit(module, tiny_loader())
    assert module.setup is True


def test_callbacks_that_save_run_after_callbacks_that_decide() -> None:
    class Decides(Callback):
        watches_metrics = True

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            order.append("decides")

    class Saves(Decides):
        best_model_path, trainer_role = "", "checkpoint"

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            order.append("saves")

    order: list[str] = []
    call(Hooks(None, TinyModule(), [Saves(), Decides()]).on_validation_end)  # type: ignore[arg-type]
    assert order == ["decides", "saves"]


def test_methods_with_other_names_are_not_hooks() -> None:
    class Net(TinyModule):
        def on_my_way(self) -> None: ...

        def on_training_epoch_end(self) -> None: ...  # ignored by Lightning, too

    with pytest.warns(UserWarning, match="never called") as warned:
        check_hooks(Net())
    assert [str(warning.message) for warning in warned] == [
        "Net.on_my_way is never called: there is no hook of that name.",
        "Net.on_training_epoch_end is never called: there is no hook of that name. Did you mean 'on_train_epoch_end'?",
    ]
    del Net.on_training_epoch_end
    Net.on_my_way = "no function"  # type: ignore[assignment, method-assign]
    check_hooks(Net())


def test_hooks_of_every_batch_are_among_the_hooks_of_a_batch_with_samples() -> None:
    class Averages(Callback):
        every_batch = True

        def on_train_batch_end(self, *arguments: Any) -> None: ...

    class Counts(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None: ...

    hooks = Hooks(None, TinyModule(), [Counts(), Callback(), Averages()])  # type: ignore[arg-type]
    assert hooks.train_batch_end_empty == hooks.train_batch_end_others[1:]


@pytest.mark.parametrize(
    "base", [fx.callbacks.ModelCheckpoint, fx.callbacks.EarlyStopping, fx.callbacks.TQDMProgressBar]
)
def test_a_constructor_without_that_of_the_base_class_is_refused(base: Any) -> None:
    class Forgets(base):
        def __init__(self) -> None:
            self.epochs: list[int] = []

    class Calls(base):
        def __init__(self) -> None:
            super().__init__(**{"monitor": "loss"} if "monitor" in inspect.signature(base).parameters else {})

    with pytest.raises(ValueError, match=r"Forgets.__init__ does not call super\(\).__init__\(\), so"):
        fx.Trainer(callbacks=[Forgets()])
    check_hooks(Calls())
