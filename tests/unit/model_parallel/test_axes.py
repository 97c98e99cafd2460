"""Axes of a mesh, without processes."""

from __future__ import annotations

import pytest

from fabricx.distributed.world import World
from fabricx.model_parallel.axes import sizes_of, with_axes


def test_the_data_axis_has_the_remaining_ranks() -> None:
    assert sizes_of(8, {"pipeline": 2, "tensor": 2}, "mesh") == {
        "data": 2, "islands": 2, "replicas": 1, "shard": 1, "pipeline": 2, "context": 1, "tensor": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("ranks", "remedy"), [(3, "set devices to 2 or 4"), (1, "set devices to 2,")])
def test_ranks_that_do_not_fit_are_an_error_with_the_nearest_numbers(ranks: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"tensor=2 needs a multiple of 2 ranks, and there are {ranks}: {remedy}"):
        sizes_of(ranks, {"pipeline": 1, "tensor": 2}, "tensor")


def test_ranks_are_numbered_along_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "new_subgroup", lambda self, parts: parts)
    sizes = sizes_of(8, {"pipeline": 2, "tensor": 2}, "mesh")
    world = with_axes(World(rank=5, size=8), sizes)  # data 1, stage 0, tensor 1
    coordinates = {
        name: (world.axis(name).rank, world.axis(name).size) for name in ("data", "pipeline", "context", "tensor")
    }
    assert coordinates == {"data": (1, 2), "pipeline": (0, 2), "context": (0, 1), "tensor": (1, 2)}
    assert world.axis("tensor").group == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert world.axis("pipeline").group == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert world.axis("data").group == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert world.axis("gradients").group == world.axis("data").group
    assert world.axis("metrics").group == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert world.axis("model").group == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world.axis("data").ranks_of_run([1]) == (4, 5, 6, 7)
    assert not world.reports  # the first stage has no outputs
    assert with_axes(World(rank=7, size=8), sizes).reports
    assert [with_axes(World(rank=rank, size=8), sizes).represents for rank in (3, 6)] == [False, True]


def test_gradients_are_averaged_over_context_ranks_and_metrics_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "new_subgroup", lambda self, parts: parts)
    world = with_axes(World(rank=6, size=8), sizes_of(8, {"context": 2, "tensor": 2}, "mesh"))
    assert world.axis("gradients").group == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert world.axis("metrics").group == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_islands_have_replicas_whose_gradients_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "new_subgroup", lambda self, parts: parts)
    sizes = sizes_of(8, {"replicas": 2, "context": 2}, "mesh")
    assert (sizes["data"], sizes["islands"]) == (4, 2)
    world = with_axes(World(rank=6, size=8), sizes)  # island 1, replica 1, context 0
    assert world.axis("replicas").group == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert world.axis("island_gradients").group == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world.axis("data").group == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert (world.axis("replicas").rank, world.axis("data").rank) == (1, 3)
    alone = with_axes(World(rank=3, size=4), sizes_of(4, {"replicas": 2}, "mesh"))
    assert (alone.axis("data").size, alone.axis("data").group) == (4, None)
    assert alone.axis("replicas").group == [[0, 1], [2, 3]]
    assert not alone.divided
    assert World(size=4).axis("replicas").size == 1


def test_ranks_at_the_same_position_in_all_islands_have_the_same_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "new_subgroup", lambda self, parts: parts)
    sizes = sizes_of(8, {"shard": 2, "tensor": 2}, "mesh")
    assert (sizes["data"], sizes["islands"]) == (4, 2)
    world = with_axes(World(rank=6, size=8), sizes)  # island 1, shard 1, tensor 0
    assert world.axis("islands").group == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert world.axis("island").group == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert world.axis("island_data").group == world.axis("shard").group == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert world.axis("data").group == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert (World(size=4).axis("islands").size, World(size=4).axis("island").size) == (4, 1)


def test_experts_are_divided_over_neighbouring_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "new_subgroup", lambda self, parts: parts)
    world = with_axes(World(rank=2, size=4), sizes_of(4, {}, "mesh"), expert=2)
    assert world.axis("expert").group == [[0, 1], [2, 3]]
    assert world.axis("copies").group == [[0, 2], [1, 3]]
    assert (world.axis("expert").rank, world.axis("copies").rank) == (0, 1)
    assert (world.axis("data").size, world.axis("model").size) == (4, 1)
    assert world.divided
    assert not World(size=2).divided


def test_a_mesh_of_data_ranks_is_the_world() -> None:
    world = World(rank=1, size=2)
    assert with_axes(world, sizes_of(2, {"tensor": 1}, "mesh")) is world
