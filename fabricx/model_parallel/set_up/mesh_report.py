"""Lines that a mesh prints before training: its axes, and the weights that each rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.distributed.world import World

MOST_RANKS: Final = 16  # with more ranks, the line has the least and the most instead of each rank's bytes


def axes_line(world: World, data: str) -> str:
    """Return the line with the sizes of the axes.

    Args:
        world: all ranks, with the axes of the mesh.
        data: name of the strategy along the data axis.
    """
    sizes = {axis: world.axis(axis).size for axis in ("data", "pipeline", "context", "tensor")}
    for axis, within in (("replicas", "gradients averaged over replicas"), ("shard", "weights sharded within them")):
        if (ranks := world.axis(axis).size) > 1:
            sizes = {"islands": sizes.pop("data") // ranks, axis: ranks, **sizes}
            data = f"{data} between islands, {within}"
    outer, *inner = sizes.items()
    axes = " x ".join(f"{axis} {size}" for axis, size in [outer, *((a, s) for a, s in inner if s > 1)])
    if (expert := world.axis("expert").size) > 1:
        axes += f" (expert {expert})"
    return f"mesh: {axes}; data ranks: {data}"


def weights_line(stored: Sequence[float], whole: int) -> str:
    """Return the line with the weights that each rank stores.

    Args:
        stored: bytes of weights, by rank.
        whole: bytes of the undivided module's weights.

    >>> weights_line([2**20, 2**21], 3 * 2**20)
    'weights: rank 0 1.0 MiB, rank 1 2.0 MiB; the whole module 3.0 MiB'
    """
    ranks = [f"rank {rank} {_mib(size)}" for rank, size in enumerate(stored)]
    if len(ranks) > MOST_RANKS:
        ranks = [f"{_mib(min(stored))} to {_mib(max(stored))} on each of {len(ranks)} ranks"]
    return f"weights: {', '.join(ranks)}; the whole module {_mib(whole)}"


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters that this rank stores.

    Args:
        module: whole or divided.
    """
    return sum(parameter.nbytes for parameter in module.parameters() if not is_placeholder(parameter))


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
