"""The Trainer's arguments as plain data for logs, where a run has no configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from fabricx.core.hparams import is_plain, plain

_LONG: Final = 200  # characters, or elements: what has more is data
_NO_TEXT: Final[Any] = object.__str__


def given(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a call that aren't the function's defaults.

    >>> def train(rate, steps=10, sizes=(1, 2)): ...
    >>> given(train, {"rate": 0.1, "steps": 10, "sizes": [3], "other": 1})
    {'rate': 0.1, 'sizes': [3]}
    """
    known = {name: one.default for name, one in inspect.signature(function).parameters.items() if name != "self"}
    found = {name: described(values[name]) for name in known if name in values}
    return {name: value for name, value in found.items() if value != described(known[name])}


def described(value: Any) -> Any:
    """Return plain data that says what a value is; of an object its class and those public attributes that are plain.

    >>> class Clip:
    ...     def __init__(self): self.limit, self._seen, self.trainer = 0.5, 3, object()
    >>> described({"clip": Clip(), "of": int, "sizes": (1, 2)})
    {'clip': {'class': 'Clip', 'limit': 0.5}, 'of': 'int', 'sizes': [1, 2]}
    """
    return plain(value, _of_object)


def _of_object(value: Any) -> Any:
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    if type(value).__str__ is not _NO_TEXT or not hasattr(value, "__dict__"):
        text = str(value)[:_LONG]
        return type(value).__name__ if " at 0x" in text else text
    public = {name: item for name, item in vars(value).items() if not name.startswith("_") and _is_short(item)}
    return {"class": type(value).__name__, **plain(public)}


def _is_short(value: Any) -> bool:
    return is_plain(value) and (not isinstance(value, Sized) or len(value) <= _LONG)
