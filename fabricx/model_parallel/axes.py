"""The axes of a device mesh: groups of ranks that compute a share of the data together or train different shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from fabricx.distributed.world import World

# From outer to inner: a tensor group is on one machine.
ORDER: Final = ("islands", "replicas", "shard", "pipeline", "context", "tensor")
JOINT: Final = {
    "data": ("islands", "replicas", "shard"), "model": ("pipeline", "context", "tensor"),
    "metrics": ("islands", "replicas", "shard", "pipeline"), "gradients": ("islands", "replicas", "shard", "context"),
    "island": ("replicas", "shard", "pipeline", "context", "tensor"), "island_data": ("replicas", "shard"),
    "island_gradients": ("replicas", "shard", "context"),
}  # fmt: skip


def sizes_of(ranks: int, axes: Mapping[str, int], name: str) -> dict[str, int]:
    """Return the number of ranks along each axis; the islands have the remaining ranks, and "data" all data ranks.

    Args:
        ranks: number of all ranks.
        axes: sizes of "replicas", "shard", "pipeline", "context" and "tensor"; 1 without.
        name: the strategy's name, for the message.

    Raises:
        ValueError: the axes do not divide the number of ranks; the message has the nearest numbers that fit.

    >>> sizes_of(8, {"pipeline": 2, "context": 1, "tensor": 2}, "mesh")
    {'data': 2, 'islands': 2, 'replicas': 1, 'shard': 1, 'pipeline': 2, 'context': 1, 'tensor': 2}
    """
    model = 1
    for size in axes.values():
        model *= size
    if ranks % model:
        factors = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
        fewer, more = ranks // model * model, (ranks // model + 1) * model
        raise ValueError(
            f"strategy={name} with {factors} needs a multiple of {model} ranks, and there are {ranks}: set devices to "
            + (f"{fewer} or {more}" if fewer else f"{more}")
            + ", or change the sizes of the axes"
        )
    islands, inner = ranks // model, {axis: axes.get(axis, 1) for axis in ORDER[1:]}
    return {"data": islands * inner["replicas"] * inner["shard"], "islands": islands, **inner}


def with_axes(world: World, sizes: Mapping[str, int], expert: int = 1) -> World:
    """Return the world with its axes; builds a process group for each axis, so that all ranks call it.

    Args:
        world: all ranks.
        sizes: result of `sizes_of`.
        expert: data ranks that divide experts; there are no other axes then.
    """
    if expert > 1:
        groups = torch.arange(world.size).view(-1, expert)
        parts = {"expert": groups, "copies": groups.T}
        return replace(world, axes={name: world.along(name, ranks.tolist()) for name, ranks in parts.items()})
    if world.size == sizes["islands"]:
        return world
    mesh = torch.arange(world.size).view([sizes[axis] for axis in ORDER])
    joint = {**{axis: (axis,) for axis in ORDER}, **JOINT}
    axes = {}
    for name, members in joint.items():
        along = [ORDER.index(axis) for axis in members]
        across = [position for position in range(len(ORDER)) if position not in along]
        length = int(torch.tensor([mesh.shape[position] for position in along]).prod())
        axes[name] = world.along(name, mesh.permute(*across, *along).reshape(-1, length).tolist())
    axes["data"] = replace(axes["data"], together=world.size // sizes["data"])
    return replace(world, axes=axes)
