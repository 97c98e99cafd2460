"""Parts of a module's tensors on a rank, and states with whole tensors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from fabricx.distributed.world import World
from fabricx.errors import RanksApart
from fabricx.model_parallel.pipeline import placeholders
from fabricx.model_parallel.set_up import division as divisions
from fabricx.model_parallel.set_up.division import Division


class Halves:
    """Divides `a.weight` in two."""

    placements = {"a.weight": None}
    ranks = 2

    def whole(self, name: str, local: Tensor) -> Tensor:
        halved = name in self.placements and local.shape == (2, 1)
        return torch.cat([local, local + 10]) if halved else local

    def part(self, name: str, whole: Tensor) -> Tensor:
        return whole[:2] if name in self.placements and whole.shape == (4, 1) else whole

    def undo(self) -> None:
        self.placements = {}


class Stages:
    """Holds `a`, and not `b`; both stages hold `c`."""

    owners = {"a.weight": (0,), "b.weight": (1,), "c.weight": (0, 1)}
    own_names = frozenset({"a.weight", "c.weight"})
    chain = SimpleNamespace(uses={"a.weight": {0}, "b.weight": {1}, "c.weight": {0, 1}})


def world() -> World:
    alone = World()
    return World(rank=0, size=8, axes={"tensor": replace(alone, size=2), "pipeline": replace(alone, size=2)})


def module(rows: int) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(1, rows, bias=False) for name in "abc"})


def test_copies_of_an_element_are_the_ranks_that_hold_it() -> None:
    built = module(2)
    division = Division(built, world(), Halves(), Stages())  # type: ignore[arg-type]
    copies = {name: division.copies(parameter) for name, parameter in built.named_parameters()}
    assert copies == {"a.weight": 2.0, "b.weight": 4.0, "c.weight": 8.0}  # of two stages, two halves, two data ranks


def test_weights_moments_and_averages_are_converted_in_both_directions() -> None:
    built = module(2)
    division = Division(built, World(), Halves(), None)  # type: ignore[arg-type]
    ones = torch.ones(2, 1)
    state: dict[str, Any] = {
        "module": {"a.weight": ones, "b.weight": ones},
        "optimizers": [{"a.weight": {"m": ones, "step": torch.ones(())}}],
        "callbacks": {"EMA": {"averages": {"a.weight": ones}}}, "other": ones,
    }  # fmt: skip
    whole = division.whole_state(state)
    assert whole["module"]["a.weight"].tolist() == [[1.0], [1.0], [11.0], [11.0]]
    assert whole["optimizers"][0]["a.weight"]["m"].shape == (4, 1)
    assert whole["callbacks"]["EMA"]["averages"]["a.weight"].shape == (4, 1)
    assert whole["other"] is ones
    assert whole["optimizers"][0]["a.weight"]["step"].shape == ()
    local = division.own_state(whole)
    assert torch.equal(local["module"]["a.weight"], ones)
    assert torch.equal(local["callbacks"]["EMA"]["averages"]["a.weight"], ones)


def test_tensors_of_other_stages_are_absent_under_all_names() -> None:
    built = module(2)
    built["again"] = built["b"]  # type: ignore[index]
    placeholders.release(built, ["b.weight"])
    division = Division(built, World(), None, Stages())  # type: ignore[arg-type]
    assert division.absent == {"b.weight", "again.weight"}
    assert list(division.own_state({"a.weight": 1, "again.weight": 2, "c.weight": 3})) == ["a.weight", "c.weight"]


def test_module_and_optimizer_have_whole_tensors_at_the_end() -> None:
    built = module(2)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in built.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    Division(built, World(), Halves(), None).restore([optimizer], lambda: None)  # type: ignore[arg-type]
    assert {name: len(p) for name, p in built.named_parameters()} == {"a.weight": 4, "b.weight": 2, "c.weight": 2}
    assert len(optimizer.state[built["a"].weight]["momentum_buffer"]) == 4  # type: ignore[index]


def test_divided_parameters_are_sharded_ones_or_all_of_a_stage() -> None:
    built = module(2)
    tensor = Division(built, world(), Halves(), None)  # type: ignore[arg-type]
    assert [parameter is built["a"].weight for parameter in tensor.divided()] == [True]
    stages = Division(built, world(), None, Stages())  # type: ignore[arg-type]
    assert len(list(stages.divided())) == 3


def test_gradients_elsewhere_are_those_of_used_parameters_on_other_stages() -> None:
    built = module(2)
    division = Division(built, world(), None, Stages())  # type: ignore[arg-type]
    absent: Any = built["b"].weight  # type: ignore[index]
    assert [parameter is absent for parameter in division.trained_elsewhere()] == [True]
    assert not division.gradient_elsewhere(absent)  # before the first backward
    built["a"].weight.grad = torch.ones(2, 1)  # type: ignore[index]
    assert division.gradient_elsewhere(absent)
    assert not division.gradient_elsewhere(built["c"].weight)  # type: ignore[index]
    absent.requires_grad_(False)
    assert list(division.trained_elsewhere()) == []


def test_hooks_gather_a_weight_that_all_ranks_read_and_others_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    model = World(size=2, store=store)
    division = Division(module(2), World(size=2, store=store, axes={"model": model}), Halves(), None)  # type: ignore[arg-type]
    half = torch.ones(2, 1)
    for number in (1, 2, 3):
        store.set(model.key(f"hook/0/{number}/1"), "a.weight")  # the other rank
        assert division.whole_weight("a.weight", half).tolist() == [[1.0], [1.0], [11.0], [11.0]]
    assert not store.check([model.key("hook/0/1/0")])  # no longer needed by any rank
    store.set(model.key("hook/0/4/1"), "b.weight")
    with pytest.raises(RanksApart, match=r"at the same moment: a\.weight, b\.weight"):
        division.whole_weight("a.weight", half)
    monkeypatch.setattr(divisions, "_MEET_S", 0.0)
    with pytest.raises(RanksApart, match=r"read weights on all ranks, outside of `if trainer.is_global_zero`"):
        division.whole_weight("a.weight", half)


def test_weights_that_not_all_ranks_hold_whole_are_named() -> None:
    built = module(2)
    placeholders.release(built, ["b.weight"])
    stages = Division(built, world(), None, Stages())  # type: ignore[arg-type]
    divided = [(name, absent) for name, _, absent in stages.divided_tensors()]
    assert divided == [("a.weight", False), ("b.weight", True)]  # both stages hold `c`
    assert [name for name, _, _ in stages.divided_tensors(also_shared=True)] == ["a.weight", "b.weight", "c.weight"]
    halves = Division(built, World(), Halves(), None)  # type: ignore[arg-type]
    assert [name for name, _, _ in halves.divided_tensors()] == ["a.weight"]
    local = torch.zeros(2, 1)
    halves.write("a.weight", local, torch.arange(4.0).view(4, 1))
    assert local.tolist() == [[0.0], [1.0]]
    halves.write("a.weight", local, torch.ones(4, 1), absent=True)
    assert local.tolist() == [[0.0], [1.0]]
