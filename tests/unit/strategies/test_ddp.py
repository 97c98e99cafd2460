"""The state of ddp's compression, and buffers of each rank."""

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


def test_each_rank_keeps_its_own_buffers_in_a_checkpoint_and_a_recovery() -> None:
    strategy, module = DDP(broadcast_buffers=False), nn.BatchNorm1d(SIZE)
    assert strategy.traits.unreplicated  # so that no rank calls `state_dict`, which communicates, without the others
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    nn.init.ones_(module.running_mean)  # type: ignore[arg-type]
    strategy.setup(module)
    state = strategy.state_dict(module, [optimizer])
    state["buffers"].insert(0, {name: torch.zeros_like(value) for name, value in state["buffers"][0].items()})
    strategy.world = World(rank=1, size=2)
    nn.init.constant_(module.running_mean, 2.0)  # type: ignore[arg-type]
    strategy.load_state_dict(state, module, [optimizer])
    assert module.running_mean.unique().tolist() == [1.0]  # type: ignore[union-attr]
    state["buffers"].append(state["buffers"][0])  # of three ranks: the buffers of rank 0, which others receive
    state["module"]["running_mean"] = torch.full((SIZE,), 3.0)
    strategy.load_state_dict(state, module, [optimizer])
    assert module.running_mean.unique().tolist() == [3.0]  # type: ignore[union-attr]


def state_of(module: nn.Module) -> dict[str, Any]:
    return {"module": module.state_dict(), "optimizers": []}
