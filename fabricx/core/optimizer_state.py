"""States of optimizers in checkpoints, keyed by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.optim import Optimizer

OTHER_STATE: Final = (
    "Resume with the optimizers and schedules of the checkpoint; or convert the checkpoint in on_load_checkpoint; or "
    "start a new run from its weights: Module.load_from_checkpoint(path), and fit without ckpt_path"
)


def by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state, keyed by names of parameters instead of torch's numbers.

    Args:
        optimizer: of the user.
        names: names of the module's parameters, by `id`.
    """
    ordered, state = _parameter_names(optimizer, names), optimizer.state_dict()
    return {
        **state,
        "class": type(optimizer).__qualname__,
        "state": {ordered[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [ordered[number] for number in g["params"]]} for g in state["param_groups"]],
    }


def by_number(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `by_name`, for an optimizer of the same class and the same groups, in any order.

    Args:
        optimizer: to which the state will be loaded.
        names: names of the module's parameters, by `id`.
        saved: result of `by_name`.

    Raises:
        ValueError: the class, the parameters or the division into groups differ.
    """
    now_class = type(optimizer).__qualname__
    if (before := saved.get("class", now_class)) != now_class:
        raise ValueError(f"the optimizer of the checkpoint is {before}, and the module's is {now_class}. {OTHER_STATE}")
    order = _parameter_names(optimizer, names)
    numbers = {name: number for number, name in enumerate(order)}
    known = {name for group in saved["param_groups"] for name in group["params"]}
    if known != set(numbers):
        missing, more = sorted(set(numbers) - known), sorted(known - set(numbers))
        raise ValueError(
            f"the optimizer of the checkpoint has other parameters than the module's: it lacks "
            f"{', '.join(missing) or 'none'}, and additionally has {', '.join(more) or 'none'}. {OTHER_STATE}"
        )
    groups = {frozenset(group["params"]): group for group in saved["param_groups"]}
    now = optimizer.state_dict()["param_groups"]
    divided = [frozenset(order[number] for number in group["params"]) for group in now]
    if set(divided) != set(groups):
        described = " and ".join(
            "; ".join(", ".join(sorted(group)) for group in division) for division in (groups, divided)
        )
        raise ValueError(
            f"the optimizer of the checkpoint has other parameter groups than the module's: {described}. {OTHER_STATE}"
        )
    return {  # torch loads by position: groups and numbers have to be in the optimizer's order
        **saved,
        "state": {numbers[name]: values for name, values in saved["state"].items()},
        "param_groups": [{**groups[key], "params": g["params"]} for key, g in zip(divided, now, strict=True)],
    }


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; a number for parameters outside of the module."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]
