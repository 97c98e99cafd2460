"""Find the part of an object that cannot be sent to another process."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fabricx import by_value
from fabricx.errors import NotPicklable

_OWN = ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__abstractmethods__", "_abc_impl")


def check_picklable(named: Mapping[str, object], error: BaseException | None = None) -> None:
    """Check that objects can be sent to workers.

    Args:
        named: the objects, with their names for the error message.
        error: cause of the error to raise.

    Raises:
        NotPicklable: names the smallest part that cannot be pickled, such as `module.net.activation`.
    """
    for name, value in named.items():
        culprit = _culprit(name, value, set())
        if culprit is not None:
            path, part = culprit
            raise NotPicklable(
                f"{path} can't be sent to the worker processes: a {type(part).__module__}.{type(part).__qualname__} "
                "can't be pickled\n"
                "  create open files, locks, generators and connections in setup(), which runs in each worker, or in a "
                "module (.py) that the script imports"
            ) from error


def _culprit(path: str, value: object, seen: set[int]) -> tuple[str, object] | None:
    """Return path and value of the smallest part of `value` that cannot be pickled, or None."""
    if id(value) in seen or _pickles(value):
        return None
    seen.add(id(value))
    for part_path, part in _parts(path, value):
        culprit = _culprit(part_path, part, seen)
        if culprit is not None:
            return culprit
    return path, value


def _pickles(value: object) -> bool:
    try:
        by_value.dumps(value)
    except Exception:
        return False
    return True


def _parts(path: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, (staticmethod, classmethod)):
        yield path, value.__func__
    elif isinstance(value, property):
        yield from ((path, function) for function in (value.fget, value.fset, value.fdel) if function is not None)
    elif isinstance(value, types.MethodType):
        yield from ((path, value.__func__), (f"{path}.__self__", value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    elif hasattr(value, "__wrapped__"):
        yield path, value.__wrapped__
    elif hasattr(value, "__dict__"):
        yield from _of_object(path, value)


def _of_object(path: str, value: Any) -> Iterator[tuple[str, object]]:
    if not by_value.is_importable(type(value)):
        yield type(value).__qualname__, type(value)
    state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
    attributes = state if isinstance(state, Mapping) else vars(value)
    for name, part in attributes.items():
        if name in ("_modules", "_parameters", "_buffers") and isinstance(part, Mapping):
            yield from ((f"{path}.{key}", inner) for key, inner in part.items())
        else:
            yield f"{path}.{name}", part


def _of_class(value: type) -> Iterator[tuple[str, object]]:
    """Return the attributes of a class that is sent by value."""
    if not by_value.is_importable(value):
        yield from ((f"{value.__qualname__}.{name}", part) for name, part in vars(value).items() if name not in _OWN)
        yield from ((base.__qualname__, base) for base in value.__bases__)


def _of_function(path: str, value: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Return the variables that a function sent by value uses."""
    if by_value.is_importable(value):
        return
    yield from ((f"a default of {path}", part) for part in (value.__defaults__, value.__kwdefaults__) if part)
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"the variable {name} that {path} uses", cell.cell_contents
        except ValueError:  # a variable without a value
            continue
    for name in by_value.variables_of(value):
        yield f"the script's variable {name} that {path} uses", value.__globals__[name]
