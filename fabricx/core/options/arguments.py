"""Arguments of the Trainer as plain data, for the record of a run without a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from fabricx.checkpoint.hyperparameters import is_plain, plain

_LONG: Final = 200  # characters or elements; longer values are data and are not recorded
_NO_TEXT: Final[Any] = object.__str__


def non_defaults(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that differ from the defaults, as plain data.

    Args:
        function: the called function.
        values: local variables at the start of the call, by name.

    >>> def train(rate, steps=10, sizes=(1, 2)): ...
    >>> non_defaults(train, {"rate": 0.1, "steps": 10, "sizes": [3], "other": 1})
    {'rate': 0.1, 'sizes': [3]}
    """
    parameters = inspect.signature(function).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    arguments = {name: described(values[name]) for name in defaults if name in values}
    return {name: value for name, value in arguments.items() if value != described(defaults[name])}


def described(value: Any) -> Any:
    """Describe a value by plain data; an object by its class and its public attributes with plain values.

    Args:
        value: any value; also nested in mappings and lists.

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
    try:
        return is_plain(value) and (not isinstance(value, Sized) or len(value) <= _LONG)
    except Exception:  # of a class of the user: a tuple without a length, for example
        return False
