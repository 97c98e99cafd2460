"""Leaves of nested arguments and outputs, with their paths."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return (key, child) pairs of a tuple, list, mapping or dataclass; None for a leaf.

    Args:
        value: a container or a leaf.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of nested tuples, lists, mappings and dataclasses, depth first.

    Args:
        value: a container or a leaf.
        path: prefix of the paths.

    >>> list(leaves([1, {"a": 2}]))
    [((0,), 1), ((1, 'a'), 2)]
    """
    inside = children(value)
    if inside is None:
        yield path, value
        return
    for key, child in inside:
        yield from leaves(child, (*path, key))


def mapped(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a nested value with changed leaves; containers without a change are the same objects.

    Args:
        value: a container or a leaf.
        change: called with the path and the leaf; returns the new leaf.
        path: prefix of the paths.

    >>> mapped([1, (2, 3)], lambda path, leaf: -leaf if path == (1, 0) else leaf)
    [1, (-2, 3)]
    """
    inside = children(value)
    if inside is None:
        return change(path, value)
    changed = {key: new for key, child in inside if (new := mapped(child, change, (*path, key))) is not child}
    return with_children(value, changed) if changed else value


def with_children(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a shallow copy of a container in which some children are replaced.

    Args:
        value: tuple, list, mapping or dataclass.
        changed: new children by key.
    """
    if isinstance(value, Mapping) and not isinstance(value, (dict, UserDict)):
        return {**value, **changed}
    if isinstance(value, tuple):
        items = [changed.get(number, item) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    new: Any = copy.copy(value)
    if isinstance(value, UserDict):  # such as the batch of a tokenizer of transformers
        new.data = dict(value.data)
    for key, child in changed.items():
        if isinstance(value, (Mapping, list)):
            new[key] = child
        else:
            object.__setattr__(new, key, child)
    return new


def copied(value: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """Return copies of nested containers and of their tensors, for code that may change a batch in place.

    Other leaves, and containers of a class that may need other arguments, are the same objects.

    Args:
        value: a container or a leaf.
        copies: copies of tensors by the `id` of the original, as a tensor may be in several places.

    >>> batch = {"x": 1, "inner": [2]}
    >>> copied(batch) == batch, copied(batch)["inner"] is batch["inner"]
    (True, False)
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]
    inside = children(value)
    if inside is None or (isinstance(value, Mapping) and not isinstance(value, (dict, UserDict))):
        return value
    if isinstance(value, tuple) and type(value) is not tuple and not hasattr(value, "_fields"):
        return value
    return with_children(value, {key: copied(child, copies) for key, child in inside})


def named(path: Path) -> str:
    """Return a path of arguments as text for a message.

    Args:
        path: begins with 0 and a number for a positional argument, with 1 and a name for a keyword argument.

    >>> named((0, 2)), named((1, "mask")), named((0, 0, 1))
    ('argument 2', "argument 'mask'", 'argument 0[1]')
    """
    inner = "".join(f"[{key!r}]" for key in path[2:])
    return f"argument {path[1]!r}{inner}"
