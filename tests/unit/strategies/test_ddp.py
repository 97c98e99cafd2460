"""The state of ddp's compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.ddp.compressed_buckets import LowRankAverager
from fabricx.distributed.world import World
from fabricx.strategies import DDP

SIZE = 8


def test_thin_matrices_are_the_same_on_all_ranks_of_another_number(recwarn: pytest.WarningsRecorder) -> None:
    strategy, module = DDP(compression="powersgd"), nn.Linear(SIZE, SIZE)
    sums = strategy._powersgd = LowRankAverager(dict(module.named_parameters()), 1)
    kept = {"weight": {"lost": torch.ones(SIZE, SIZE), "basis": torch.ones(SIZE, 1)}}
    state = {**state_of(module), "own": kept}
    strategy.load_local_states([state], module, [], own=True)
    assert sums.state()["weight"]["lost"].all()
    assert not recwarn.list
    strategy.load_local_states([state], module, [], own=False)
    assert not sums.state()["weight"]["lost"].any()
    assert sums.state()["weight"]["basis"].all()
    assert "the compression errors of gradients are dropped" in str(recwarn.pop().message)


def test_complex_matrices_are_not_compressed_to_factors() -> None:
    strategy, module = DDP(compression="powersgd"), nn.Linear(SIZE, SIZE, dtype=torch.complex64)
    strategy.world = World(size=2)
    with pytest.raises(ValueError, match=r"a parameter is complex: train torch\.view_as_real of it"):
        strategy.setup(module)


def state_of(module: nn.Module) -> dict[str, Any]:
    return {"module": module.state_dict(), "optimizers": []}
