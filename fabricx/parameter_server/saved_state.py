"""Parts of a checkpoint that only strategies with servers have: error feedback, and state of the update rule."""

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


def saved_rule(
    module: nn.Module, parameters: Sequence[Tensor], tensors: Mapping[str, Sequence[Tensor]], rounds: int
) -> dict[str, Any]:  # fmt: skip
    """Return the state of the servers' update rule, for a checkpoint.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        tensors: tensors of the rule, by name and parameter.
        rounds: rounds of an outer optimizer.

    Returns:
        The velocity of an outer optimizer by name of the parameter as "outer", which is the format of `local_sgd`; all
        else as "rule".
    """
    named = {name: _by_name(module, parameters, values) for name, values in tensors.items()}
    outer = {"outer": named.pop("velocity")} if "velocity" in named else {}
    return {**outer, "rule": {"rounds": rounds, "tensors": named}}


def loaded_rule(
    module: nn.Module, parameters: Sequence[Tensor], state: Mapping[str, Any]
) -> tuple[dict[str, list[Tensor]], int] | None:
    """Return the state of the servers' update rule in a checkpoint: tensors by name and parameter, and rounds.

    Args:
        module: the user's module.
        parameters: parameters of all optimizers.
        state: state of the strategy; earlier versions saved the velocity only, before that as a vector of all
            parameters named "0".

    Returns:
        None without such a state, and if it belongs to other parameters.
    """
    rule = state.get("rule", {"rounds": 0, "tensors": {}})
    loaded = {
        name: values
        for name, saved in {"velocity": state.get("outer", {}), **rule["tensors"]}.items()
        if (values := _by_parameter(module, parameters, saved)) is not None
    }
    return (loaded, rule["rounds"]) if loaded else None


def _by_name(module: nn.Module, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
    by_id = {id(parameter): value for parameter, value in zip(parameters, values, strict=True)}
    return {name: by_id[id(p)].view(p.shape) for name, p in module.named_parameters() if id(p) in by_id}


def _by_parameter(
    module: nn.Module, parameters: Sequence[Tensor], saved: Mapping[str, Tensor]
) -> list[Tensor] | None:  # fmt: skip
    numbers = {id(parameter) for parameter in parameters}
    named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in numbers}
    sizes = [parameter.numel() for parameter in named.values()]
    if "0" in saved and saved["0"].numel() == sum(sizes):
        saved = dict(zip(named, saved["0"].split(sizes), strict=True))
    if any(name not in saved or saved[name].numel() != parameter.numel() for name, parameter in named.items()):
        return None
    by_id = {id(parameter): saved[name].view(parameter.shape) for name, parameter in named.items()}
    return [by_id[id(parameter)] for parameter in parameters]
