"""Gradients of divided experts, and of the other weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.experts.expert_sums import ExpertSums


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four data ranks in two groups; each sum doubles a tensor, or triples it over the copies."""

    def all_reduce(world: World, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor if op == "max" else tensor.mul_(3 if world.coordinate == "copies" else 2)

    monkeypatch.setattr(World, "all_reduce", all_reduce)
    alone = World()
    copies, expert = replace(alone, size=2, coordinate="copies"), replace(alone, size=2)
    module, strategy = nn.ModuleDict({"experts": nn.Linear(1, 1), "gate": nn.Linear(1, 1)}), ExpertSums()
    strategy.enter(World(size=4, axes={"copies": copies, "expert": expert}), module)
    strategy.experts = SimpleNamespace(  # type: ignore[assignment]
        placements={"experts.weight": None, "experts.bias": None}, ranks=2, calls=0, zero=lambda: None,
        begin_backward=lambda: None, release=lambda: None,
    )  # fmt: skip
    strategy.setup(module)
    return strategy


def loss(module: Any) -> Tensor:
    return module["experts"](torch.ones(1, 1)).sum() + module["gate"](torch.ones(1, 1)).sum()  # type: ignore[no-any-return]


def test_gradients_of_experts_are_summed_over_their_copies_only(sums: ExpertSums) -> None:
    assert sums.module is not None
    with sums.accumulate():
        sums.backward(loss(sums.module))
    assert [float(p.grad.sum()) for p in sums.module.parameters()] == [1.0] * 4  # type: ignore[union-attr]
    sums.backward(loss(sums.module))
    assert [float(p.grad.sum()) for p in sums.module.parameters()] == [6.0, 6.0, 4.0, 4.0]  # type: ignore[union-attr]


def test_a_rank_without_a_sample_computes_a_sample_of_another_rank(sums: ExpertSums) -> None:
    calls: list[Any] = []

    def step(batch: Any, index: int) -> Any:
        calls.append(batch)
        return {"loss": loss(sums.module)} if batch == "good" else None

    assert sums.computes_together
    wrapped = sums.wrap_step(step)
    with pytest.raises(ValueError, match="has not received a batch yet"):
        sums.backward_without_data()
    wrapped("good", 0)
    assert sums.backward_without_data(("bad", 1))  # no loss: its newest batch with a loss
    assert calls == ["good", "bad", "good"]
    assert sums.module is not None
    assert all(float(p.grad) == 0 for p in sums.module.parameters())  # type: ignore[arg-type]
    sums._newest = ()
    assert not sums.backward_without_data(("bad", 1))
    sums.teardown()
    assert sums.wrap_step(step) is step


def test_a_step_that_has_computed_experts_sends_their_gradients_without_a_loss(sums: ExpertSums) -> None:
    module: Any = sums.module

    steps: list[int] = []

    def step(*_: Any) -> None:
        steps.append(1)
        sums.experts.calls = 1  # type: ignore[union-attr, misc]

    wrapped = sums.wrap_step(step)
    wrapped()
    with pytest.raises(ValueError, match="return a loss of zero, or set use_reentrant=False"):
        sums.backward_without_data()
    module["experts"].requires_grad_(False)
    steps.clear()
    wrapped()
    began: list[int] = []
    sums.experts.begin_backward = lambda: began.append(1)  # type: ignore[union-attr, method-assign]
    assert sums.backward_without_data(("not computed", 1))  # nothing is trained before the experts
    assert began == steps == [1]
    assert sums.backward_without_data(("computed", 1))  # without a sample
    assert steps == began == [1, 1]
    sums.experts.zero = lambda: module["gate"].weight.sum() * 0  # type: ignore[union-attr, method-assign]
    wrapped()
    assert sums.backward_without_data()
    assert float(module["gate"].weight.grad) == 0
