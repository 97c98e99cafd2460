"""Parts of a checkpoint that only strategies with servers have: error feedback, and the outer optimizer's velocity."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

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
    protocol.load_error_feedback(kept["workers"][world.rank])
    protocol.server_feedback = kept["servers"]


def velocity_by_name(
    module: nn.Module, parameters: Sequence[Tensor], velocity: Sequence[Tensor]
) -> dict[str, Tensor]:  # fmt: skip
    """Return a velocity by name of the parameter, which is the format of `local_sgd`.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        velocity: velocity by parameter, in its shape.
    """
    by_id = {id(p): moving for p, moving in zip(parameters, velocity, strict=True)}
    return {name: by_id[id(p)].view(p.shape) for name, p in module.named_parameters() if id(p) in by_id}


def velocity_by_parameter(
    module: nn.Module, parameters: Sequence[Tensor], saved: Mapping[str, Tensor]
) -> list[Tensor] | None:  # fmt: skip
    """Return a saved velocity by parameter, in its shape; None if it belongs to other parameters.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        saved: result of `velocity_by_name`; earlier versions saved a vector of all parameters as "0".
    """
    numbers = {id(parameter) for parameter in parameters}
    named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in numbers}
    sizes = [parameter.numel() for parameter in named.values()]
    if "0" in saved and saved["0"].numel() == sum(sizes):
        saved = dict(zip(named, saved["0"].split(sizes), strict=True))
    if any(name not in saved or saved[name].numel() != parameter.numel() for name, parameter in named.items()):
        return None
    by_id = {id(parameter): saved[name].view(parameter.shape) for name, parameter in named.items()}
    return [by_id[id(parameter)] for parameter in parameters]
