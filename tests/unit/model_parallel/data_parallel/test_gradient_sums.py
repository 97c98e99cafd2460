"""Gradients that are summed after backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.data_parallel.gradient_sums import GradientSums


def test_gradients_of_other_ranks_are_added_and_unused_parameters_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    used_by_other = torch.tensor([1, 1, 0], dtype=torch.int8)
    calls: list[str] = []

    def all_reduce(world: World, tensor: Tensor, op: str = "sum") -> Tensor:
        calls.append(op)
        return tensor.copy_(torch.maximum(tensor, used_by_other)) if op == "max" else tensor.mul_(2)

    monkeypatch.setattr(World, "all_reduce", all_reduce)
    strategy = GradientSums()
    strategy.enter(World(rank=0, size=2), module)
    with strategy.accumulate():
        module[0](torch.ones(1, 2)).sum().backward()
        strategy.end_backward()
    assert calls == []  # the window continues
    strategy.end_backward()
    gradients = [part.weight.grad for part in module]
    assert [None if g is None else g.tolist() for g in gradients] == [[[2.0, 2.0]], [[0.0, 0.0]], None]
    assert calls == ["max", "sum"]
    strategy.absent = {"2.weight"}
    strategy.teardown()
    assert strategy.absent == ()  # the next module may be whole
