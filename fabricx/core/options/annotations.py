"""Compare values of a configuration with the annotations of the parameters that they are passed to."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN: Final = (bool, int, float, str, list, dict, types.NoneType)  # other values are objects of the user
_ACCEPTED: Final[Mapping[Any, Any]] = {
    bool: bool, int: int, float: (int, float), str: str, types.NoneType: types.NoneType,
    list: list, tuple: list, set: list, dict: dict,
}  # fmt: skip


def check_value(key: str, value: Any, function: Callable[..., Any], name: str) -> None:
    """Raise an error if a value of a configuration is not of the type of its parameter.

    Only plain data and annotations of plain types (also in unions) are compared; elements of lists are not.

    Args:
        key: key of the value, for the message.
        value: the value.
        function: class or function that the value is passed to.
        name: name of the parameter.

    Raises:
        ValueError: the value has another type; the message contains the annotation.
    """
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None or type(value) not in _PLAIN or type(value) is type(parameter.default):
        return
    if isinstance(value, dict) and "_target_" in value:
        return
    annotation = _evaluated(parameter.annotation, function)
    if not accepts(annotation, value):
        raise ValueError(
            f"{key}={value!r} is of type {type(value).__name__}, and {getattr(function, '__name__', function)} is "
            f"annotated with {name}: {inspect.formatannotation(annotation)}; set a value of this type"
        )


def accepts(annotation: Any, value: Any) -> bool:
    """Return whether plain data can be of an annotation's type; True for annotations of other types.

    As for type checkers, an int is a valid float. A list is valid for tuples and sets, which YAML lacks. Of a Literal
    only the type counts; classes check its values with better messages.

    Args:
        annotation: evaluated annotation.
        value: plain data.

    >>> accepts(float, "fast"), accepts(float | None, 1), accepts(tuple[int, int], [1, 2])
    (False, True, True)
    """
    origin = get_origin(annotation) or annotation
    if origin in (Union, types.UnionType):
        return any(accepts(member, value) for member in get_args(annotation))
    if origin is Annotated:
        return accepts(get_args(annotation)[0], value)
    if origin is Literal:
        return type(value) in map(type, get_args(annotation))
    return not isinstance(origin, type) or isinstance(value, _ACCEPTED.get(origin, object))


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    """Return an annotation as an object; Any if it can't be evaluated, such as an import for type checkers only."""
    code: Any = inspect.unwrap(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return get_type_hints(holder, globalns=getattr(code, "__globals__", {}), include_extras=True)["value"]
    except Exception:
        return Any
