"""Hooks: their names, and the order of calls."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.testing import TinyModule, tiny_loader


def test_callbacks_run_before_the_module_and_those_that_watch_metrics_after_it(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class First(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append("callback")

    class Watching(Callback):
        watches_metrics = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append(f"watching {float(trainer.callback_metrics['late'])}")

    class Mine(TinyModule):
        def on_train_epoch_end(self) -> None:
            order.append("module")
            self.log("late", 3.0)

    fx.Trainer(max_epochs=1, callbacks=[Watching(), First()], **quiet).fit(Mine(), tiny_loader())
    assert order == ["callback", "module", "watching 3.0"]


def test_a_misspelt_hook_is_refused_with_the_nearest_name(quiet: dict[str, Any]) -> None:
    class Wrong(Callback):
        def on_train_epoch_edn(self) -> None: ...

    with pytest.raises(ValueError, match="Did you mean 'on_train_epoch_end'"):
        fx.Trainer(callbacks=[Wrong()], **quiet)
