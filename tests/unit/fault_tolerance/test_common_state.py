"""The state that all ranks continue from after a failure."""

from __future__ import annotations

from typing import Any

import fabricx as fx
from fabricx.fault_tolerance.common_state import common_state
from fabricx.session.saving import run_state
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Compares(fx.Callback):
    """Records the state after a recovery, beside that of a checkpoint, in the second of four batches."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = common_state(trainer.session)
            self.changed = [
                name for name in ("batches", "accumulate") if state[name] != run_state(trainer.session)[name]
            ]


def test_a_recovery_restores_all_state_of_a_checkpoint() -> None:
    compares = Compares()
    fx.Trainer(max_epochs=1, callbacks=[compares], **QUIET).fit(TinyModule(), tiny_loader(16, 4))
    assert compares.changed == []
