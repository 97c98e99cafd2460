"""The state that all ranks continue from after a failure."""

from __future__ import annotations

from typing import Any

import fabricx as fx
from fabricx.fault_tolerance.common_state import common_state, load_common_state
from fabricx.fault_tolerance.hook_entries import hook_entries
from fabricx.session.rank_state import from_record
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


class Returns(fx.Callback):
    """Loads the state of the second of four batches, after another accumulation was set."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            session = trainer.session
            ranks = [from_record(session.rank_state().record())]
            state = {**common_state(session), "hook_entries": hook_entries(session), "ranks": ranks}
            session.options.accumulate_grad_batches = 2  # by the schedule of a later epoch
            load_common_state(session, state, 0, newcomer=False, behind=False, goes_back=True)


def test_ranks_that_go_back_have_the_accumulation_of_the_state() -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[Returns()], **QUIET)
    trainer.fit(TinyModule(), tiny_loader(16, 4))
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (1, 4)
