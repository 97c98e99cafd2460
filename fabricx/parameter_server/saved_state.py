"""Parts of a checkpoint that only strategies with servers have: error feedback, and the outer optimizer's velocity."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.parameter_server.worker.protocol import WorkerProtocol


def restore_feedback(
    kept: Mapping[str, Any] | None, protocol: WorkerProtocol[Any], world: World, servers: int
) -> None:  # fmt: skip
    """Restore the error feedback of a checkpoint, if the numbers of workers and servers are the same.

    Args:
        kept: {"workers": feedback of each worker, "servers": feedback of each server}; None without.
        protocol: this worker's protocol.
        world: the ranks.
        servers: number of servers.
    """
    protocol.server_feedback = ()
    if kept is None:
        return
    if len(kept["workers"]) != world.size or len(kept["servers"]) != servers:
        if world.main_rank:
            warnings.warn(
                f"the checkpoint was written with {len(kept['workers'])} workers and {len(kept['servers'])} "
                "servers: the error feedback of compression is lost",
                stacklevel=2,
            )
        return
    protocol.keep(kept["workers"][world.rank])
    protocol.server_feedback = kept["servers"]


def flat_velocity(module: nn.Module, parameters: Sequence[Tensor], velocity: Sequence[Tensor]) -> Tensor:
    """Return a velocity in the order of the module's parameters, shape [elements].

    The format is that of `local_sgd` with a single fragment.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        velocity: velocity by parameter, in its shape.
    """
    by_id = {id(p): moving for p, moving in zip(parameters, velocity, strict=True)}
    return torch.cat([by_id[id(p)].reshape(-1) for p in module.parameters() if id(p) in by_id])


def velocity_by_parameter(module: nn.Module, parameters: Sequence[Tensor], saved: Tensor | None) -> list[Tensor] | None:
    """Return a saved velocity by parameter, in its shape; None if it belongs to other parameters.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        saved: result of `flat_velocity`; None without.
    """
    numbers = {id(parameter) for parameter in parameters}
    ordered = [parameter for parameter in module.parameters() if id(parameter) in numbers]
    if saved is None or saved.numel() != sum(parameter.numel() for parameter in ordered):
        return None
    parts = saved.split([parameter.numel() for parameter in ordered])
    by_id = {id(p): part.view(p.shape) for p, part in zip(ordered, parts, strict=True)}
    return [by_id[id(parameter)] for parameter in parameters]
