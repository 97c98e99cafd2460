"""What a run was made with in Python, as plain data for people to read: there is no configuration then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

_DEPTH: Final = 3  # of objects in objects
_NO_TEXT: Final[Any] = object.__str__


def given(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a call that aren't the function's defaults.

    >>> def train(rate, steps=10, sizes=(1, 2)): ...
    >>> given(train, {"rate": 0.1, "steps": 10, "sizes": [3], "other": 1})
    {'rate': 0.1, 'sizes': [3]}
    """
    known = {name: one.default for name, one in inspect.signature(function).parameters.items() if name != "self"}
    plain = {name: described(values[name]) for name in known if name in values}
    return {name: value for name, value in plain.items() if value != described(known[name])}


def described(value: Any, depth: int = 0) -> Any:
    """Return plain data that says what a value is; of an object its class and its public attributes.

    >>> class Clip:
    ...     def __init__(self): self.limit, self._seen = 0.5, 3
    >>> described({"clip": Clip(), "of": int, "sizes": (1, 2)})
    {'clip': {'class': 'Clip', 'limit': 0.5}, 'of': 'int', 'sizes': [1, 2]}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [described(item, depth + 1) for item in value]
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    has_text = type(value).__str__ is not _NO_TEXT
    if has_text or not hasattr(value, "__dict__") or depth >= _DEPTH:
        text = str(value)
        return type(value).__name__ if " at 0x" in text else text
    public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
    return {"class": type(value).__name__, **{name: described(item, depth + 1) for name, item in public.items()}}
