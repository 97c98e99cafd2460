"""Attributes and methods of callbacks other than hooks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import fabricx as fx
from fabricx.core.callback import Callback, attach
from fabricx.testing import TinyModule, tiny_loader


class Logs(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log_dict({"end": 2.0})


def test_a_callback_logs_through_the_module_of_the_run(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[Logs()], **quiet)
    trainer.fit(TinyModule(), tiny_loader())
    assert (float(trainer.callback_metrics["index"]), float(trainer.callback_metrics["end"])) == (1.5, 2.0)


def test_a_copy_of_a_callback_has_no_module() -> None:
    callback = Logs()
    attach(callback, TinyModule())
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback)), Logs()):
        with pytest.raises(RuntimeError, match=r"Logs\.log\('end', \.\.\.\) was called outside of a run"):
            other.log_dict({"end": 2.0})
