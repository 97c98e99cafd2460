"""Meshes with a single axis."""

from __future__ import annotations

import pytest

import fabricx as fx
from fabricx.strategies import ExpertMesh, Mesh


@pytest.mark.parametrize(("name", "ranks"), [("tensor", 3), ("pipeline", 2), ("context", 2)])
def test_presets_have_all_ranks(name: str, ranks: int) -> None:
    strategy = fx.Trainer(devices=ranks, strategy=name, logger=False, enable_checkpointing=False).strategy
    assert isinstance(strategy, Mesh)
    sizes = strategy._sizes(ranks)
    assert {axis: size for axis, size in sizes.items() if size > 1} == {name: ranks}


def test_ranks_that_divide_experts_are_data_ranks() -> None:
    strategy = fx.Trainer(devices=3, strategy="expert", logger=False, enable_checkpointing=False).strategy
    assert isinstance(strategy, ExpertMesh)
    assert strategy.data_ranks_of(3) == 3
    assert strategy.traits.joint_steps
    assert not strategy.traits.replicated
    mesh = Mesh(expert=2)
    traits = mesh._traits_of(mesh._sizes(4), 2)
    assert traits.replicas_of(1, 4) == [1, 3]
    assert not traits.resizable
