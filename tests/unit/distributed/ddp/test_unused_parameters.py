"""Parameters that no rank has used, on a device whose reductions end after the backward has returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricx.distributed.ddp.unused_parameters import UnusedParameters
from fabricx.distributed.world import World


def test_lists_of_other_ranks_are_read_after_the_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    store, used, unused = dist.HashStore(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    world = World(rank=0, size=2, store=store, device=torch.device("cuda"))

    class Stream:
        def synchronize(self) -> None:  # the other rank has reached the reductions, too
            UnusedParameters(World(rank=1, size=2, store=store), [used, unused], set())._write(b"\0\1")

    stream: Any = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    UnusedParameters(world, [used, unused], set()).complete(used.sum(), warns=False)
    assert unused.grad is None  # equal on all ranks, and skipped by weight decay
