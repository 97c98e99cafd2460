"""States of optimizers in checkpoints, keyed by the names of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.checkpoint.optimizer_numbers import HELD
from fabricx.core.strategy_support.held_gradients import held_gradients

_AT_START: Final = "_fabricx_groups_at_start"  # attribute of an optimizer: number of groups when training begins
_EXTENDS: Final = "_fabricx_extends_schedules"  # attribute of an optimizer, if a callback extends its schedules
_LISTS: Final = (  # attributes of schedules with a value for each group
    "base_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "min_lrs",
)  # fmt: skip
OTHER_STATE: Final = (
    "Resume with the optimizers and schedules of the checkpoint; or convert the checkpoint in on_load_checkpoint; or "
    "start a new run from its weights: Module.load_from_checkpoint(path), and fit without ckpt_path"
)


def let_groups_grow(optimizer: Optimizer, *, schedules: bool = False) -> None:
    """Let a loaded state add groups to an optimizer, or remove them, as hooks have done after the start of training.

    Args:
        optimizer: optimizer of a module, with the groups of `configure_optimizers` and `on_fit_start`.
        schedules: a callback extends the schedules of the optimizer for each group that it adds.
    """
    vars(optimizer)[_AT_START] = len(optimizer.param_groups)
    if schedules:
        vars(optimizer)[_EXTENDS] = True


def _grow(optimizer: Optimizer, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter], saved: Any) -> None:
    """Make the groups that hooks have added to an optimizer those of a saved state."""
    least = vars(optimizer).get(_AT_START)
    if least is None:
        return
    kept = {frozenset(group["params"]) for group in saved["param_groups"]}
    for number in reversed(range(least, len(optimizer.param_groups))):
        group = optimizer.param_groups[number]
        if frozenset(names.get(id(parameter), "") for parameter in group["params"]) not in kept:
            del optimizer.param_groups[number]  # the state is that before the group was added
            for parameter in group["params"]:
                if grows(optimizer):  # a hook of the user may add parameters that were never frozen
                    parameter.requires_grad = False
                optimizer.state.pop(parameter, None)
    known = {names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]}
    # A state of an earlier version doesn't have the number.
    first = saved.get("groups_at_start", least if grows(optimizer) else len(saved["param_groups"]))
    for group in saved["param_groups"][first:]:
        if known.isdisjoint(group["params"]) and parameters.keys() >= set(group["params"]):
            added = [parameters[name] for name in group["params"]]
            for parameter in added:
                parameter.requires_grad = True
            optimizer.add_param_group({**group, "params": added})


@contextmanager
def added_once(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Context of hooks that have run before: `add_param_group` ignores parameters that an optimizer has already.

    Args:
        optimizers: optimizers of the module, which may have a loaded state.
    """
    changed = [optimizer for optimizer in optimizers if "add_param_group" not in vars(optimizer)]
    for optimizer in changed:
        vars(optimizer)["add_param_group"] = functools.partial(_add, optimizer, optimizer.add_param_group)
    try:
        yield
    finally:
        for optimizer in changed:
            del vars(optimizer)["add_param_group"]


def _add(optimizer: Optimizer, add: Callable[[dict[str, Any]], None], param_group: dict[str, Any]) -> None:
    given = param_group["params"]
    given = [given] if isinstance(given, Tensor) else list(given)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(entry[1] if isinstance(entry, tuple) else entry) in known for entry in given):
        add({**param_group, "params": given})


def grows(optimizer: Optimizer) -> bool:
    """Return whether a callback adds groups to an optimizer and its schedules.

    Args:
        optimizer: optimizer of a module.
    """
    return _EXTENDS in vars(optimizer)


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
    least = vars(optimizer).get(_AT_START)
    return {
        **state,
        **({} if least is None else {"groups_at_start": least}),
        "class": type(optimizer).__qualname__,
        "state": values,
        "param_groups": [{**g, "params": [ordered[number] for number in g["params"]]} for g in state["param_groups"]],
    }


def by_number(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `by_name`, for an optimizer of the same class and the same groups, in any order.

    Groups that hooks had added to the optimizer of the state are added.

    Args:
        optimizer: optimizer to which the state will be loaded.
        parameters: the module's parameters, by name.
        saved: result of `by_name`.

    Raises:
        ValueError: the class, the parameters or the division into groups differ.
    """
    now_class = type(optimizer).__qualname__
    if (before := saved.get("class", now_class)) != now_class:
        raise ValueError(f"the optimizer of the checkpoint is {before}, and the module's is {now_class}. {OTHER_STATE}")
    names = {id(parameter): name for name, parameter in parameters.items()}
    _grow(optimizer, names, parameters, saved)
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
