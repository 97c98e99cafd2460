"""Signatures of users' steps and hooks, which may have fewer or more parameters than the loop has arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def fitting(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that accepts all arguments of a hook, and passes the parameters of the user's method.

    Args:
        function: the user's function, with any number of the hook's parameters.
        names: names of the hook's arguments, in their order.

    Returns:
        the same function, if it accepts all arguments.

    >>> fitting(lambda batch: batch, ["batch", "batch_idx"])("a", 0)
    'a'
    >>> fitting(lambda batch, *, batch_idx=7: batch_idx, ["batch", "batch_idx"])("a", 0)
    0
    """
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    most = sum(p.kind in _POSITIONAL for p in parameters)
    if most >= len(names):
        return function
    rest = set(names[most:])
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in rest]
    if not named:
        return lambda *args: function(*args[:most])
    numbers = [(name, names.index(name)) for name in named]
    return lambda *args: function(*args[:most], **{name: args[number] for name, number in numbers})


def accepts(function: Callable[..., Any], most: int) -> int:
    """Return how many of `most` positional arguments a step accepts, so that steps may have fewer parameters.

    Args:
        function: the step.
        most: number of arguments that the loop can pass.

    >>> accepts(lambda batch: None, 3), accepts(lambda batch, *rest: None, 3)
    (1, 3)
    """
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    return min(most, sum(p.kind in _POSITIONAL for p in parameters))


def requires(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments without a default.

    Args:
        function: the step.

    >>> requires(lambda batch, batch_idx, dataloader_idx=0: None)
    2
    """
    parameters = _parameters(function) or []
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


def unknown_parameters(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Return the parameters of a user's method for which a hook has no argument, and which have no default.

    Args:
        function: the user's function.
        names: names of the hook's arguments, in their order.

    >>> unknown_parameters(lambda batch, batch_idx, optimizer_idx: None, ["batch", "batch_idx"])
    ['optimizer_idx']
    """
    parameters = _parameters(function) or []
    needed = [p for p in parameters if p.default is p.empty]
    beyond = [p.name for p in needed if p.kind in _POSITIONAL][len(names) :]
    return beyond + [p.name for p in needed if p.kind is p.KEYWORD_ONLY and p.name not in names]


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters; none for a function without a readable signature.

    Args:
        function: any function; a bound method is without `self`.
    """
    return [parameter.name for parameter in _parameters(function) or []]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions in C
        return None
