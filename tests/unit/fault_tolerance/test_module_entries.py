"""What a module adds to checkpoints reaches replacements, too."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.fault_tolerance.module_entries import load_module_entries, module_entries
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Counts(TinyModule):
    count = 3

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["layer.bias"]
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count, self.seen = checkpoint["count"], sorted(checkpoint)


class Asks(fx.Callback):
    """Collects the entries in a batch, and restores them."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.entries = module_entries(trainer.session)
        module.count = 0
        self.called = load_module_entries(
            trainer.session, {"callbacks": {}, "state": {"epoch": 0, "step": 0}}, self.entries
        )
        assert "layer.bias" in module.state_dict()


def asked(module: fx.Module) -> Asks:
    asks = Asks()
    fx.Trainer(max_steps=1, callbacks=[asks], **QUIET).fit(module, tiny_loader(4, 4))
    return asks


def test_entries_are_those_that_the_module_adds_and_it_restores_them() -> None:
    module = Counts()
    asks = asked(module)
    assert (asks.entries, asks.called, module.count) == ({"count": 3}, True, 3)
    assert {"callbacks", "count", "epoch", "global_step", "hyper_parameters", "state_dict"} <= set(module.seen)


def test_a_module_without_both_hooks_has_no_entries() -> None:
    asks = asked(TinyModule())
    assert (asks.entries, asks.called) == (None, False)


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


def test_a_hook_that_fails_before_the_first_batch_ends_no_run() -> None:
    module: Any = CreatesLater()
    asks = Asks()
    asks.entries = None
    fx.Trainer(max_steps=1, callbacks=[asks], **QUIET).fit(module, tiny_loader(4, 4))
    assert isinstance(asks.entries, str)
    assert "has no attribute 'seen'" in asks.entries
    assert asks.called is False


class Cut(Counts):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_lost_connection_is_no_error_of_the_hook() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        asked(Cut())
