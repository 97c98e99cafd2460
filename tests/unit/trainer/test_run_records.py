"""The records of a run that remain in the trainer."""

from __future__ import annotations

import fabricx as fx
from fabricx.testing import QUIET, TinyModule


def test_the_callers_trainer_adopts_the_records_of_a_run() -> None:
    ran, caller, module = fx.Trainer(**QUIET), fx.Trainer(**QUIET), TinyModule()
    ran.state.step, ran.stop.interrupted = 7, True
    caller.records.adopt(ran.records)
    caller.attach(module, None)
    assert (caller.global_step, caller.interrupted, caller.module, caller.datamodule) == (7, True, module, None)
    assert module.trainer is caller  # as after a run in this process
