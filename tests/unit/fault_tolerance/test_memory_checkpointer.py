"""Copies of a rank that is interrupted while another rank still copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.distributed.world import World
from fabricx.fault_tolerance import memory_checkpoint, memory_checkpointer
from fabricx.fault_tolerance.memory_checkpointer import MemoryCheckpointer
from fabricx.strategies import FSDP


@pytest.mark.parametrize(("steps", "kept"), [((1, 2), {1, 9}), ((1, 2, 3), {2, 9})])
def test_a_copy_before_a_change_keeps_the_newest_complete_copy_of_all_ranks(
    steps: tuple[int, ...], kept: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made after steps 1 and 2; the end of step 3 implies that all ranks have their copies of step 2."""
    member = SimpleNamespace(folder=str(tmp_path), worker=0, slot=0, changes=True)
    monkeypatch.setattr(memory_checkpointer, "membership", lambda: member)
    monkeypatch.setattr(memory_checkpointer, "progress", lambda session: session.state.step)
    for name in ("_tensors", "common_state", "hook_entries"):
        monkeypatch.setattr(memory_checkpointer, name, lambda session: {})
    monkeypatch.setattr(memory_checkpointer, "layout_of", lambda strategy: None)
    for number in range(memory_checkpoint.NEWEST):
        memory_checkpoint.path_of(str(tmp_path), 0, number).touch()
    session: Any = SimpleNamespace(
        strategy=FSDP(), state=SimpleNamespace(step=0), world=World(),
        rank_state=lambda: SimpleNamespace(record=dict), fault_tolerance=SimpleNamespace(resume_point=None),
    )  # fmt: skip
    checkpointer = MemoryCheckpointer(World(), FSDP().traits.replicas_of, every=1)
    checkpointer._members = (0,)
    for step in steps:
        session.state.step = step
        checkpointer._next = step if step < 3 else 100
        checkpointer.after_step(session)
    session.state.step = 9
    checkpointer.before_change(session, torn=False)
    assert {step for (step, _), _ in memory_checkpoint.read(str(tmp_path))} == kept
