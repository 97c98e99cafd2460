"""Checkpoint entries of callbacks and the module are also sent to replacements."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import EMA
from fabricx.fault_tolerance.hook_entries import MODULE, hook_entries, load_hook_entries, report_failed_hooks
from fabricx.testing import QUIET, TinyModule, kill, tiny_loader


class Counts(TinyModule):
    count = 3

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["layer.bias"]
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count, self.seen = checkpoint["count"], sorted(checkpoint)


class Remembers(fx.Callback):
    """Hooks with only the needed parameters."""

    value = 5

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["value"] = self.value

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.value = checkpoint["value"]


class CollectsEntries(fx.Callback):
    """Collects the entries in a batch, and restores them."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.entries = hook_entries(trainer.session)
        module.count = 0
        for callback in trainer.callbacks:
            if isinstance(callback, Remembers):
                callback.value = 0
        state = {"callbacks": {}, "state": {"epoch": 0, "step": 0}}
        report_failed_hooks(trainer.session, self.entries)
        self.called = load_hook_entries(trainer.session, state, self.entries)
        assert "layer.bias" in module.state_dict()


def asked(module: fx.Module, *callbacks: fx.Callback) -> CollectsEntries:
    asks = CollectsEntries()
    fx.Trainer(max_steps=1, callbacks=[asks, *callbacks], **QUIET).fit(module, tiny_loader(4, 4))
    return asks


def test_the_module_receives_its_hook_entries_for_restoration() -> None:
    module = Counts()
    asks = asked(module)
    assert (asks.entries, asks.called, module.count) == (({"count": 3}, {}), True, 3)
    assert {"callbacks", "count", "epoch", "global_step", "hyper_parameters", "state_dict"} <= set(module.seen)


def test_callbacks_restore_their_entries() -> None:
    callback = Remembers()
    asks = asked(TinyModule(), callback)
    assert (asks.entries, asks.called, callback.value) == (({"value": 5}, {}), False, 5)


class Exports(fx.Callback):
    """Writes files whenever a checkpoint is written; it has no state."""

    exported = 0

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.exported += 1
        checkpoint["exported"] = self.exported


def test_hooks_without_entries_are_not_called() -> None:
    callback = Exports()
    asks = asked(TinyModule(), callback, kill(rank=0).during("checkpoint"), EMA(0.5))
    assert (asks.entries, asks.called, callback.exported) == (({}, {}), False, 0)


class CreatesLater(TinyModule):
    """Its hook reads an attribute that the first batch creates."""

    seen: float

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = 1.0
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def test_a_failing_hook_before_the_first_batch_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    callback = Remembers()
    asks = asked(CreatesLater(), callback)
    values, failed = asks.entries
    assert values == {"value": 5}
    assert "has no attribute 'seen'" in failed[MODULE]
    assert asks.called is False
    assert callback.value == 5  # all other hooks are called
    assert "on_save_checkpoint of the module raised AttributeError" in capsys.readouterr().out


class Cut(Counts):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_lost_connection_is_not_an_error_of_the_hook() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        asked(Cut())
