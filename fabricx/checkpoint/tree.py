"""Splits a nested state into named tensors and plain data, and joins them again."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fabricx.checkpoint.unread import is_unread

PLACE: Final = "__tensor__"
_ATOMS: Final = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.bool_, np.str_,
)  # fmt: skip


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Replace the tensors in nested dicts, lists and tuples by placeholders.

    Named tuples and `defaultdict` stay as they are: objects with their tensors. Other classes derived from dict, list
    and tuple become a dict, list or tuple if they have tensors.

    Args:
        state: nested dicts, lists and tuples.

    Returns:
        The tree with placeholders; and the tensors by path (keys joined by slashes).

    >>> rest, tensors = split({"step": 3, "layers": [torch.zeros(2)]})
    >>> rest, list(tensors)
    ({'step': 3, 'layers': [{'__tensor__': 'layers/0'}]}, ['layers/0'])
    """
    tensors: dict[str, Tensor] = {}
    return _split(state, (), tensors), tensors


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if is_unread(value):  # `isinstance` would be a use of it
        return value
    if isinstance(value, Tensor):
        key = "/".join(path)
        while key in tensors:  # a dict with the keys 1 and "1"
            key += "'"
        tensors[key] = value.detach()
        return {PLACE: key}
    before = len(tensors)
    if isinstance(value, Mapping):
        if type(value) is defaultdict or not all(map(is_key, value)):  # one object with its tensors
            return value
        kind = OrderedDict if type(value) is OrderedDict else dict
        mapped = kind((key, _split(item, (*path, escape(str(key))), tensors)) for key, item in value.items())
        return mapped if len(tensors) > before or type(value) is dict else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [_split(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
        if type(value) is list or len(tensors) == before:
            return items if type(value) is list else value
        return items if isinstance(value, list) else tuple(items)
    return value


def join(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Replace placeholders by their tensors: the inverse of `split`.

    Args:
        rest: tree with placeholders.
        tensors: tensors by path.

    Raises:
        KeyError: a tensor is missing.
    """
    if type(rest) is dict and set(rest) == {PLACE}:
        return tensors[rest[PLACE]]
    if type(rest) in (dict, OrderedDict):
        return type(rest)((key, join(value, tensors)) for key, value in rest.items())
    if type(rest) in (list, tuple):
        return type(rest)(join(value, tensors) for value in rest)
    return rest


def is_atom(value: Any) -> bool:
    """Return whether a value is plain data without parts.

    Args:
        value: any value.
    """
    kind = type(value)
    return kind in _ATOMS or issubclass(kind, np.number)


def is_key(value: Any) -> bool:
    """Return whether a value is plain data that may be a key.

    Args:
        value: any value.
    """
    return is_atom(value) or (type(value) is tuple and all(map(is_key, value)))


def escape(key: str) -> str:
    """Escape a key for use in a path.

    Args:
        key: any text.
    """
    return key.replace("%", "%25").replace("/", "%2F")


def like(
    sharded: Mapping[str, Tensor], map_location: Any, callbacks: Iterable[str] = ()
) -> Callable[[str, torch.Size, torch.dtype], Tensor]:  # fmt: skip
    """Return a function that allocates a tensor by name, shape and dtype: a shard if it belongs to a sharded parameter.

    Args:
        sharded, callbacks: see `owner`.
        map_location: device of all other tensors.
    """
    parameter_of = owner(sharded, callbacks)

    def room(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameter_of(name, size)
        if parameter is not None:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype, device=map_location)

    return room


def owner(
    sharded: Mapping[str, Tensor], callbacks: Iterable[str] = ()
) -> Callable[[str, torch.Size], Tensor | None]:  # fmt: skip
    """Return a function that finds the sharded parameter to which a tensor (a weight, a moment) belongs, if any.

    Hooks of users see whole weights, so tensors of their callbacks and entries are whole, also by the same names.

    Args:
        sharded: sharded parameters by name.
        callbacks: names of the callbacks whose state has shards.
    """
    places = ("strategy/", *(f"callbacks/{escape(name)}/" for name in callbacks))
    shapes = {escape(name): tensor for name, tensor in sharded.items()}

    def parameter_of(name: str, size: torch.Size) -> Tensor | None:
        if not name.startswith(places):
            return None
        named = (shapes[part] for part in name.split("/") if part in shapes)
        return next((tensor for tensor in named if tensor.shape == size), None)

    return parameter_of
