"""Copies of nested lists and dictionaries of numbers, texts and arrays, in a form that a checkpoint keeps."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

NATIVE: Final = {bool, int, float, str, type(None)}
_LISTS: Final = 1_000_000  # more lists within lists are assumed to be data


def is_plain(value: Any) -> bool:
    """Return whether a list or dictionary has numbers, texts, arrays, tensors, and lists of these only.

    Args:
        value: any value; a tensor that requires a gradient is not plain.

    >>> is_plain([[0, 1], (2, "a")]), is_plain({"a": {3}}), is_plain(3)
    (True, False, False)
    """
    if not isinstance(value, (list, dict)):
        return False
    open_, lists = [value], 0
    while open_ and lists < _LISTS:
        part: Any = open_.pop()
        lists += 1
        kinds = set(map(type, part))
        if isinstance(part, dict):
            if not all(kind in NATIVE or issubclass(kind, np.generic) for kind in kinds):
                return False
            part = list(part.values())
            kinds = set(map(type, part))
        if kinds <= NATIVE:
            continue
        for item in part:
            if type(item) in (list, tuple, dict):
                open_.append(item)
            elif not (type(item) in NATIVE or _is_number(item)):
                return False
    return not open_


def _is_number(item: Any) -> bool:
    if isinstance(item, (np.ndarray, np.generic)):
        return item.dtype.kind in "iufb" and item.dtype.itemsize <= 8
    return type(item) is Tensor and not item.requires_grad


def packed(value: Any) -> Any:
    """Return a copy of a plain value, without tuples and arrays, and with keys in lists.

    Args:
        value: for which `is_plain` is true, or a part of it.
    """
    if isinstance(value, list):
        kinds = set(map(type, value))
        if len(kinds) == 1 and issubclass(next(iter(kinds)), np.generic):  # one tensor instead of many
            return {"numbers": torch.from_numpy(np.array(value))}
        return list(value) if kinds <= NATIVE else [packed(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": packed(list(value))}
    if isinstance(value, dict):
        return {"keys": packed(list(value)), "values": packed(list(value.values()))}
    if isinstance(value, (np.ndarray, np.generic)):
        return {"array": torch.from_numpy(np.array(value))}
    return value.clone() if isinstance(value, Tensor) else value


def unpacked(value: Any) -> Any:
    """Return a value of which `packed` made a copy, as another copy.

    Args:
        value: result of `packed`.

    >>> unpacked(packed({1: [(2, "a"), np.arange(3)]}))
    {1: [(2, 'a'), array([0, 1, 2])]}
    """
    if isinstance(value, (list, tuple)):
        return list(value) if set(map(type, value)) <= NATIVE else [unpacked(item) for item in value]
    if isinstance(value, Tensor):
        return value.clone()
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return value["array"].numpy().copy()[()]  # [()] makes a number of an array without dimensions
    if "numbers" in value:
        return list(value["numbers"].numpy())
    if "tuple" in value:
        return tuple(unpacked(value["tuple"]))
    return dict(zip(unpacked(value["keys"]), unpacked(value["values"]), strict=True))


def same(first: Any, second: Any) -> bool:
    """Return whether two results of `packed` are equal.

    Args:
        first, second: results of `packed`.
    """
    if isinstance(first, list) and isinstance(second, list):
        if set(map(type, first)) <= NATIVE:
            return first == second
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)
