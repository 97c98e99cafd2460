"""States of optimizers in checkpoints, keyed by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.held_gradients import HELD, held_gradients

_GROWS: Final = "_fabricx_grows"  # attribute of an optimizer: module, and number of groups at the start
_LISTS: Final = (  # attributes of schedules with a value for each group
    "base_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "min_lrs",
)  # fmt: skip
OTHER_STATE: Final = (
    "Resume with the optimizers and schedules of the checkpoint; or convert the checkpoint in on_load_checkpoint; or "
    "start a new run from its weights: Module.load_from_checkpoint(path), and fit without ckpt_path"
)
_ADDED: Final = (
    "If a hook of the module adds them during training (add_param_group), add them in configure_optimizers, with "
    "requires_grad=False until they are trained; or add them by a callback that derives from BaseFinetuning, whose "
    "groups are restored"
)


def let_groups_grow(optimizer: Optimizer, module: nn.Module) -> None:
    """Let a loaded state add groups of a module's parameters to an optimizer, or remove them.

    Args:
        optimizer: optimizer to which a callback adds groups during training.
        module: has the parameters.
    """
    vars(optimizer)[_GROWS] = (module, len(optimizer.param_groups))


def _grow(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Make the groups of an optimizer those of a saved state, if they may grow."""
    module, least = vars(optimizer).get(_GROWS, (None, 0))
    if module is None:
        return
    parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    kept = {frozenset(group["params"]) for group in saved["param_groups"]}
    for group in optimizer.param_groups[least:]:
        if frozenset(names.get(id(parameter), "") for parameter in group["params"]) not in kept:
            optimizer.param_groups.remove(group)  # the state is that before the group was added
            for parameter in group["params"]:
                parameter.requires_grad = False
                optimizer.state.pop(parameter, None)
    known = {names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]}
    for group in saved["param_groups"]:
        if known.isdisjoint(group["params"]) and set(group["params"]) <= set(parameters):
            added = [parameters[name] for name in group["params"]]
            for parameter in added:
                parameter.requires_grad = True
            optimizer.add_param_group({**group, "params": added})


def grows(optimizer: Optimizer) -> bool:
    """Return whether a callback adds groups to an optimizer.

    Args:
        optimizer: optimizer of a module.
    """
    return _GROWS in vars(optimizer)


def extend_schedule(scheduler: Any) -> None:
    """Give a schedule, and the schedules within it, values for each group that was added to its optimizer.

    Values of a group that was removed are removed.

    Args:
        scheduler: of torch, or another object.
    """
    for inner in getattr(scheduler, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        extend_schedule(inner)
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None:
        return
    groups = optimizer.param_groups
    known = [group for group in groups if "initial_lr" in group]
    for group in groups if known else ():  # OneCycleLR keeps its rates and momenta in the groups
        ratio = _number(group["lr"]) / (_number(known[-1]["lr"]) or 1.0)
        kept = {key: value for key, value in known[-1].items() if key not in group}
        group.update({key: value * ratio if key.endswith("_lr") else value for key, value in kept.items()})
    lists = {name: values for name in _LISTS if isinstance(values := getattr(scheduler, name, None), list) and values}
    if "base_lrs" in lists:
        rates = [_number(group["lr"]) for group in groups[len(lists["base_lrs"]) :]]
        if highest := lists.get("max_lrs"):  # CyclicLR
            ratio = _number(highest[-1]) / (_number(lists["base_lrs"][-1]) or 1.0)
            highest += [rate * ratio for rate in rates]
        lists["base_lrs"] += rates
    for values in lists.values():
        values.extend([values[-1]] * (len(groups) - len(values)))
        del values[len(groups) :]


def _number(rate: Any) -> float:
    return float(rate.item()) if isinstance(rate, Tensor) else float(rate)


def by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state, keyed by names of parameters instead of torch's numbers.

    Args:
        optimizer: the user's optimizer.
        names: names of the module's parameters, by `id`.
    """
    ordered, state = _parameter_names(optimizer, names), optimizer.state_dict()
    values = {ordered[number]: values for number, values in state["state"].items()}
    for parameter, gradient in held_gradients(optimizer).items():
        name = names.get(id(parameter), "")
        values[name] = {**values.get(name, {}), HELD: gradient}
    values.pop("", None)  # a parameter outside of the module
    return {
        **state,
        "class": type(optimizer).__qualname__,
        "state": values,
        "param_groups": [{**g, "params": [ordered[number] for number in g["params"]]} for g in state["param_groups"]],
    }


def by_number(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `by_name`, for an optimizer of the same class and the same groups, in any order.

    Args:
        optimizer: optimizer to which the state will be loaded.
        names: names of the module's parameters, by `id`.
        saved: result of `by_name`.

    Raises:
        ValueError: the class, the parameters or the division into groups differ.
    """
    now_class = type(optimizer).__qualname__
    if (before := saved.get("class", now_class)) != now_class:
        raise ValueError(f"the optimizer of the checkpoint is {before}, and the module's is {now_class}. {OTHER_STATE}")
    _grow(optimizer, saved)
    order = _parameter_names(optimizer, names)
    numbers = {name: number for number, name in enumerate(order)}
    known = {name for group in saved["param_groups"] for name in group["params"]}
    if known != set(numbers):
        missing, more = sorted(set(numbers) - known), sorted(known - set(numbers))
        remedy = OTHER_STATE if missing else f"{_ADDED}. {OTHER_STATE}"
        raise ValueError(
            f"the optimizer of the checkpoint has other parameters than the module's: it lacks "
            f"{', '.join(missing) or 'none'}, and additionally has {', '.join(more) or 'none'}. {remedy}"
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
