"""What all ranks go on from after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import fabricx as fx
from fabricx.fault_tolerance.common_state import _report_stream, common_state
from fabricx.session.saving import run_state
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Compares(fx.Callback):
    """Notes what a recovery goes on from, beside what a checkpoint has, in the second batch of four."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = common_state(trainer.session)
            self.changed = [
                name for name in ("batches", "accumulate") if state[name] != run_state(trainer.session)[name]
            ]


def test_a_recovery_goes_on_from_all_that_a_checkpoint_has() -> None:
    compares = Compares()
    fx.Trainer(max_epochs=1, callbacks=[compares], **QUIET).fit(TinyModule(), tiny_loader(16, 4))
    assert compares.changed == []


@pytest.mark.parametrize("exact", [False, True])
def test_the_loss_of_a_position_in_asynchronous_streams_is_said(exact: bool) -> None:
    lines: list[str] = []
    data = SimpleNamespace(train_feed=SimpleNamespace(exact_position=exact), train_dataloader=[])
    session: Any = SimpleNamespace(data=data, print=lines.append)
    _report_stream(session)
    assert len(lines) == (not exact)
    assert all("batches may be trained twice or not at all" in line for line in lines)
