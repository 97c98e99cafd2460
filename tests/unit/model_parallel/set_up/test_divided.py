"""The parts of a divided module; `process/test_mesh.py` has several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from fabricx.distributed.world import World
from fabricx.errors import RanksApart
from fabricx.model_parallel.set_up import division as divisions
from fabricx.model_parallel.set_up.divided import Divided, Settings, stage_channels

SETTINGS = Settings("mesh", {}, False, 1, "all_gather", "auto", None, "1f1b", 1, "auto", half=False)


def test_a_module_computes_in_its_own_data_types_and_in_16_bits_if_the_run_does() -> None:
    whole = Divided(SETTINGS, nn.Linear(2, 2).double(), World())
    assert whole.dtypes() == {torch.float64}
    assert replace(whole, settings=replace(SETTINGS, half=True)).dtypes() == {torch.float64, torch.bfloat16}


def test_the_gradient_is_of_all_ranks_or_of_the_island_if_islands_differ() -> None:
    axes = {"data": replace(World(), size=3), "island": replace(World(), size=2)}
    whole = Divided(SETTINGS, nn.Linear(2, 2), World(size=6, axes=axes))
    parameter = next(whole.module.parameters())
    ranks, copies = whole.gradient_ranks()
    assert (ranks.size, copies(parameter)) == (6, 6.0)
    ranks, copies = replace(whole, settings=replace(SETTINGS, apart=True)).gradient_ranks()
    assert (ranks.size, copies(parameter)) == (2, 2.0)


def test_all_ranks_read_a_weight_whose_rows_are_sharded_also_in_new_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divisions, "_MEET_S", 0.0)
    world = World(size=2, store=HashStore(), axes={"model": World()})
    whole = Divided(SETTINGS, nn.Linear(2, 2), world)
    whole.division.meet("weight")  # the model axis has no other rank
    sharded = replace(whole, settings=replace(SETTINGS, sharded=True))
    for divided in (sharded, sharded.world_changed(replace(world, generation=1))):
        with pytest.raises(RanksApart):
            divided.division.meet("weight")


def test_a_backend_that_reports_closed_connections_has_no_stage_channels() -> None:
    assert stage_channels(World()) == {}
