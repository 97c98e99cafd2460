"""Lines that a mesh prints before training."""

from __future__ import annotations

from torch import nn

from fabricx.distributed.world import World
from fabricx.model_parallel.set_up.mesh_report import axes_line, parameter_bytes, weights_line


def test_axes_of_one_rank_are_omitted_except_data() -> None:
    world = World(size=4, axes={"data": World(size=1), "pipeline": World(size=2), "tensor": World(size=2)})
    assert axes_line(world, "fsdp") == "mesh: data 1 x pipeline 2 x tensor 2; data ranks: fsdp"
    experts = World(size=4, axes={"expert": World(size=2)})
    assert axes_line(experts, "ddp") == "mesh: data 4 (expert 2); data ranks: ddp"


def test_islands_and_replicas_are_the_data_axis() -> None:
    world = World(size=8, axes={"data": World(size=4), "replicas": World(size=4), "tensor": World(size=2)})
    line = "data ranks: local_sgd between islands, gradients averaged over replicas"
    assert axes_line(world, "local_sgd") == f"mesh: islands 1 x replicas 4 x tensor 2; {line}"
    world = World(size=8, axes={"data": World(size=8), "shard": World(size=4)})
    line = "data ranks: local_sgd between islands, weights sharded within them"
    assert axes_line(world, "local_sgd") == f"mesh: islands 2 x shard 4; {line}"


def test_many_ranks_are_summarised() -> None:
    line = weights_line([float(2**20 * (1 + rank)) for rank in range(17)], 2**24)
    assert line == "weights: 1.0 MiB to 17.0 MiB on each of 17 ranks; the whole module 16.0 MiB"


def test_bytes_of_parameters_are_counted_by_dtype() -> None:
    assert parameter_bytes(nn.Linear(4, 2)) == 4 * (8 + 2)
    assert parameter_bytes(nn.Linear(4, 2).half()) == 2 * (8 + 2)
