"""Freed memory is returned to the system."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fabricx.distributed.heap import LARGE, release_freed_memory
from fabricx.distributed.world import World
from fabricx.strategies import FSDP, fsdp

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is asked")
def test_freed_blocks_between_used_blocks_are_returned_to_the_system() -> None:
    kept, freed = [], []
    for _ in range(2000):  # below the size from which blocks are mapped separately
        freed.append(torch.ones(16 * 1024))
        kept.append(torch.ones(16))
    before = resident()
    freed.clear()
    assert release_freed_memory()
    assert before - resident() > 2000 * 16 * 1024 * 4 // 2
    assert len(kept) == 2000


def test_fsdp_returns_large_gathered_memory_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(fsdp, "release_freed_memory", lambda: calls.append(1))
    for elements, size, expected in ((LARGE // 4, 2, 1), (LARGE // 4 - 1, 2, 0), (LARGE // 4, 1, 0)):
        strategy = FSDP()
        strategy.world = World(rank=0, size=size)
        strategy.module = SimpleNamespace(named_parameters=lambda n=elements: [("w", torch.empty(n, device="meta"))])  # type: ignore[assignment]
        strategy.attach_optimizers([])
        assert strategy.after_update(7) == 7
        assert len(calls) == expected, (elements, size)
        calls.clear()
