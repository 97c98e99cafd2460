"""Reads numpy arrays and scalars in files of torch without numpy's own reconstruction.

numpy's functions trust a pickle: with a crafted dtype they read bytes of the file as addresses. The replacements here
accept numbers, texts and times only.
"""

from __future__ import annotations

import re
from types import FunctionType
from typing import Any, Final

import numpy as np
from torch import Tensor

from fabricx.checkpoint.unread import is_unread

_KINDS: Final = re.compile(r"[<>=|]?(\?|b1|[iuf][1248]|c8|c16|[SU]\d+|[mM]8)")


class Type:
    """Replaces `numpy.dtype`.

    Args:
        code: type code, such as "f8".
        rest: alignment and copying, which are ignored.
    """

    def __init__(self, code: Any, *rest: Any) -> None:
        if not isinstance(code, str) or not _KINDS.fullmatch(code):
            raise ValueError("an array of another type than numbers, texts and times")
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        _, order, *fields = state[:5]
        if order not in ("<", ">", "=", "|") or any(fields):
            raise ValueError("an array of another type than numbers, texts and times")
        unit = state[8][1] if self.value.kind in "mM" and len(state) > 8 else None
        if unit is not None:
            name, count = unit[0], unit[1]
            name = name.decode() if isinstance(name, bytes) else str(name)
            if not name.isalpha():  # "s],O8" would add objects
                raise ValueError("an unknown unit of time")
            suffix = "" if name == "generic" else f"[{int(count)}{name}]"
            self.value = np.dtype(f"{self.value.kind}8{suffix}")
        self.value = self.value.newbyteorder(order)


class Array:
    """Replaces `numpy.ndarray` and the function that creates arrays; `value` is the array.

    Args:
        parts: class, shape and type of an empty array, which are ignored.
    """

    def __init__(self, *parts: Any) -> None:
        self.value = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, Type) or not isinstance(content, bytes):
            raise ValueError("an array of objects")
        flat = np.frombuffer(content, kind.value).copy()
        self.value = flat.reshape(tuple(map(int, shape)), order="F" if by_columns else "C")


def scalar(kind: Any, content: Any) -> Any:
    """Return a numpy scalar; replaces `numpy.core.multiarray.scalar`.

    Args:
        kind: dtype.
        content: bytes of the scalar.
    """
    if not isinstance(kind, Type) or not isinstance(content, bytes):
        raise ValueError("a numpy scalar that is not a number, text or time")
    return np.frombuffer(content, kind.value, count=1)[0]


def empty(*arguments: Any) -> bytes:
    """Return the content of an empty array; replaces `bytes`, whose argument may be a size.

    Args:
        arguments: none.
    """
    if arguments:
        raise ValueError("bytes of a stated size")
    return b""


GLOBALS: Final[list[Any]] = [
    (Type, "numpy.dtype"),
    (Array, "numpy.ndarray"),
    (empty, "builtins.bytes"),
    *((Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


def settled(content: Any) -> Any:
    """Return the content of a file with numpy arrays and dtypes instead of the replacements.

    Args:
        content: read with `GLOBALS`; lists and dicts are changed in place.
    """
    return _settled(content, set())


def _settled(content: Any, seen: set[int]) -> Any:
    if is_unread(content):
        return content
    if isinstance(content, (Type, Array)):
        return content.value
    if type(content) is tuple:
        return tuple(_settled(item, seen) for item in content)
    if id(content) in seen:
        return content
    if isinstance(content, dict):
        seen.add(id(content))
        for name, value in content.items():
            content[name] = _settled(value, seen)
    elif isinstance(content, list):
        seen.add(id(content))
        content[:] = [_settled(item, seen) for item in content]
    elif _has_attributes(content):  # a namespace, or an object of a class that the user has allowed
        seen.add(id(content))
        _settled(vars(content), seen)
    return content


def _has_attributes(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(kind, "__dict__") and kind.__dictoffset__ != 0 and not isinstance(value, (type, Tensor, FunctionType))
    )
