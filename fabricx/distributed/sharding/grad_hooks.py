"""Refuse gradient hooks of parameters that torch drops when it pickles or shards the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.errors import NotPicklable


def number_of_hooks(parameter: Any, *, accumulated: bool = True) -> int:
    """Return the number of gradient hooks of a parameter.

    Args:
        parameter: any tensor.
        accumulated: include hooks of `register_post_accumulate_grad_hook`.
    """
    return len(parameter._backward_hooks or ()) + len((accumulated and parameter._post_accumulate_grad_hooks) or ())


def _first_hooked(module: nn.Module) -> str | None:
    """Return the name of the first parameter with a gradient hook."""
    return next((name for name, parameter in module.named_parameters() if number_of_hooks(parameter)), None)


def check_before_pickling(module: nn.Module) -> None:
    """Refuse to pickle a module with gradient hooks, which pickle drops.

    Args:
        module: module to send to worker processes.

    Raises:
        NotPicklable: a parameter has a gradient hook; the message names the parameter.
    """
    if (name := _first_hooked(module)) is not None:
        raise NotPicklable(
            f"a gradient hook of module.{name} can't be sent to the worker processes: call register_hook or "
            "register_post_accumulate_grad_hook in configure_model, setup or on_fit_start, which run in each worker"
        )


def check_before_sharding(module: nn.Module) -> None:
    """Refuse gradient hooks of parameters that FSDP is about to replace by shards.

    Args:
        module: not sharded yet.

    Raises:
        ValueError: a parameter has a gradient hook; the message names the parameter.
    """
    if (name := _first_hooked(module)) is not None:
        raise ValueError(
            f"{name} has a gradient hook, which is lost when strategy=fsdp shards it: call "
            "register_post_accumulate_grad_hook in on_fit_start, where the parameter is this rank's shard, or use "
            "strategy=ddp"
        )


def check_sharded(module: nn.Module) -> None:
    """Refuse `register_hook` on shards: autograd sees only the gathered parameters and never calls such a hook.

    Args:
        module: sharded.

    Raises:
        ValueError: a shard has such a hook; the message names the parameter.
    """
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) and number_of_hooks(parameter, accumulated=False):
            raise ValueError(no_hook(name))


def no_hook(name: str) -> str:
    """Return the error message for `register_hook` on a shard.

    Args:
        name: name of the parameter.
    """
    return (
        f"{name} has a hook of register_hook, which is never called under strategy=fsdp: call "
        "register_post_accumulate_grad_hook in on_fit_start, where the parameter is this rank's shard, or use "
        "strategy=ddp"
    )


def keep_hooks(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Copy post-accumulate gradient hooks to the parameters that replace the original ones, by name.

    Args:
        before: original parameters by name.
        now: present parameters by name.

    >>> old, new = ({"weight": nn.Linear(1, 1).weight} for _ in range(2))
    >>> _ = old["weight"].register_post_accumulate_grad_hook(print)
    >>> keep_hooks(old, new)
    >>> number_of_hooks(new["weight"])
    1
    """
    for name, parameter in before.items():
        hooks: Any = parameter._post_accumulate_grad_hooks
        for hook in (hooks or {}).values() if now[name] is not parameter else ():
            now[name].register_post_accumulate_grad_hook(hook)
