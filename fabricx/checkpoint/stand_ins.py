"""Reads a file of torch with stand-ins in the place of the objects whose classes torch's safe unpickler refuses.

No class or function that the file names is imported or called: the unpickler is torch's own for plain data, and it
finds a stand-in of this module under each name that it would refuse.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from fabricx.checkpoint.numpy_data import Array, Type
from fabricx.checkpoint.unread import Unread

# Top-level modules whose functions no object of a user's class needs: a file that names them is an attack.
_HOSTILE: Final = frozenset({
    "bdb", "code", "codeop", "ctypes", "importlib", "marshal", "multiprocessing", "nt", "os", "pdb", "pickle", "posix",
    "pty", "runpy", "shutil", "socket", "subprocess", "sys", "timeit", "webbrowser",
})  # fmt: skip
_HOSTILE_BUILTINS: Final = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open"})


@final
class _Mark:
    """First entry of a dict or a list that stands in for an object of a derived class."""

    def __init__(self, name: str) -> None:
        self.name = name


class _StandIn:
    """Accepts what an unpickler does with an object, and keeps nothing of it."""

    name: str

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _DictStandIn(_StandIn):
    # The unpickler adds entries to dicts of two exact classes, and attributes to one of them.
    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        mark = _Mark(cls.name)
        return OrderedDict({mark: mark})


class _ListStandIn(_StandIn):
    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return [_Mark(cls.name)]


class _Type(Type):
    """A dtype, also of objects."""

    def __init__(self, code: Any, *rest: Any) -> None:
        try:
            super().__init__(code, *rest)
        except ValueError:
            self.value = np.dtype(object)

    def __setstate__(self, state: Any) -> None:
        if not self.value.hasobject:
            super().__setstate__(state)


class _Array(Array):
    """An array; of an array of objects, nothing is kept."""

    of_objects = False

    def __setstate__(self, state: Any) -> None:
        if isinstance(state[2], _Type) and state[2].value.hasobject:
            self.of_objects = True
        else:
            super().__setstate__(state)


_NUMPY: Final = {Type: _Type, Array: _Array}


def refused_names(file: Any) -> set[str]:
    """Return the names of classes and functions in a file of torch that torch's safe unpickler refuses.

    Args:
        file: local path, or open file, of an archive.

    Raises:
        UnpicklingError: a name is that of a function by which files attack.
        ValueError: the file is a program of TorchScript.
    """
    _rewind(file)
    names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    for name in sorted(names):
        module, _, rest = name.partition(".")
        if module in _HOSTILE or (module == "builtins" and rest in _HOSTILE_BUILTINS):
            raise pickle.UnpicklingError(f"GLOBAL {name}")
    return names


def load(file: Any, plain: Sequence[Any], shown: object, **options: Any) -> Any:
    """Return the content of a file of torch, with an `Unread` for each object whose class is refused.

    Args:
        file: local path, or open file.
        plain: further classes of plain data, as for `torch.serialization.safe_globals`.
        shown: path for messages.
        options: of `torch.load`.

    Raises:
        UnpicklingError: an object is made in a way that the unpickler does not support, or the file attacks.
    """
    plain = [(_NUMPY.get(entry[0], entry[0]), entry[1]) if isinstance(entry, tuple) else entry for entry in plain]
    with torch.serialization.safe_globals(plain):
        kinds: dict[str, type] = dict.fromkeys(refused_names(file), _StandIn)
        while True:
            made: list[Any] = [(_made(name, kind), name) for name, kind in kinds.items()]
            _rewind(file)
            try:
                with torch.serialization.safe_globals(made):
                    return _settled(torch.load(file, weights_only=True, **options), shown, set())
            except pickle.UnpicklingError as error:
                text = str(error)
                refused = [n for n, kind in kinds.items() if kind is _StandIn and f"'{_module(n)}.StandIn'" in text]
                if not refused or not ("SETITEM" in text or "append to lists" in text or "extend lists" in text):
                    raise
                kinds[refused[0]] = _DictStandIn if "SETITEM" in text else _ListStandIn


def _rewind(file: Any) -> None:
    if hasattr(file, "seek"):
        file.seek(0)


def _made(name: str, kind: type) -> Any:
    return type("StandIn", (kind,), {"name": name, "__module__": _module(name)})


def _module(name: str) -> str:
    return f"stand_in.{name}"


def _settled(content: Any, shown: object, seen: set[int]) -> Any:
    """Replace stand-ins by `Unread` in nested dicts, lists and tuples, which are changed in place."""
    if isinstance(content, _StandIn) or (isinstance(content, type) and issubclass(content, _StandIn)):
        return Unread(content.name, shown)
    if isinstance(content, _Array) and content.of_objects:
        return Unread("numpy.ndarray", shown)
    if isinstance(content, _Type) and content.value.hasobject:
        return Unread("numpy.dtype", shown)
    if type(content) is tuple:
        return tuple(_settled(item, shown, seen) for item in content)
    if isinstance(content, (set, frozenset)) and (standing := [item for item in content if _stands(item)]):
        return _settled(standing[0], shown, seen)
    if isinstance(content, list) and content and type(content[0]) is _Mark:
        return Unread(content[0].name, shown)
    if isinstance(content, dict):
        for name in content:
            if type(name) is _Mark:
                return Unread(name.name, shown)
            if _stands(name):
                return _settled(name, shown, seen)
    if id(content) in seen or isinstance(content, (Tensor, type)):
        return content
    seen.add(id(content))
    if isinstance(content, dict):
        for name, value in content.items():
            content[name] = _settled(value, shown, seen)
    elif isinstance(content, list):
        content[:] = [_settled(item, shown, seen) for item in content]
    elif isinstance(content, Namespace):
        _settled(vars(content), shown, seen)
    return content


def _stands(item: Any) -> bool:
    return isinstance(item, _StandIn) or (isinstance(item, type) and issubclass(item, _StandIn))
