"""Reads a file of torch, with stand-ins for objects whose classes torch's safe unpickler refuses.

No class or function that the file names is imported or called: torch's unpickler for plain data reads the file, and
each name that it would refuse refers to a stand-in of this module.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
_GETATTR: Final = "builtins.getattr"
_HOSTILE_BUILTINS: Final = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input", "open"})


@final
class _Mark:
    """First entry of a dict or a list that stands in for an object of a derived class."""

    def __init__(self, name: str) -> None:
        self.name = name


class _StandIn:
    """Accepts the construction and the state of an object, and stores neither."""

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
    """An array; the elements of an array of objects are discarded."""

    of_objects = False

    def __setstate__(self, state: Any) -> None:
        if isinstance(state[2], _Type) and state[2].value.hasobject:
            self.of_objects = True
        else:
            super().__setstate__(state)


class _Moment(_StandIn):
    """A time; a time in a zone of a refused class is discarded."""

    name = "datetime.datetime"

    def __new__(cls, *arguments: Any) -> Any:
        return object.__new__(cls) if any(map(_stands, arguments)) else datetime.datetime(*arguments)


_REPLACED: Final[dict[Any, Any]] = {Type: _Type, Array: _Array, datetime.datetime: _Moment}


class Attack(pickle.UnpicklingError):
    """The file names a function that executes code or opens files, as malicious files do."""


class Unsupported(pickle.UnpicklingError):
    """The file names no harmful function, but constructs an object in a way that torch's unpickler does not support."""


def refused_names(file: Any) -> set[str]:
    """Return the names of classes and functions in a file of torch that torch's safe unpickler refuses.

    Args:
        file: local path, or open file, of an archive.

    Raises:
        Attack: a name is that of a harmful function.
        UnpicklingError: the unpickler does not support the file.
        ValueError: the file is a program of TorchScript.
    """
    _rewind(file)
    names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    for name in sorted(names):
        module, _, rest = name.partition(".")
        if module in _HOSTILE or (module == "builtins" and rest in _HOSTILE_BUILTINS):
            raise Attack(f"GLOBAL {name}")
    return names


def load(file: Any, plain: Sequence[Any], shown: object, **options: Any) -> Any:
    """Return the content of a file of torch, with an `Unread` for each object whose class is refused.

    Args:
        file: local path, or open file.
        plain: further classes of plain data, as for `torch.serialization.safe_globals`.
        shown: path for messages.
        options: further arguments of `torch.load`.

    Raises:
        Attack: see `refused_names`.
        Unsupported: an object is constructed in a way that the unpickler does not support.
        UnpicklingError: the names in the file can't be found.
    """
    plain = [
        (_REPLACED.get(kind, kind), global_name(entry))
        for entry in plain
        for kind in [entry[0] if isinstance(entry, tuple) else entry]
    ]
    with torch.serialization.safe_globals(plain):
        kinds: dict[str, type] = dict.fromkeys(refused_names(file), _StandIn)
        while True:
            _rewind(file)
            try:
                with _allowed(kinds):
                    return _settled(torch.load(file, weights_only=True, **options), shown, set())
            except pickle.UnpicklingError as error:
                text = str(error)
                refused = [n for n, kind in kinds.items() if kind is _StandIn and f"'{_module(n)}.StandIn'" in text]
                if not refused or not ("SETITEM" in text or "append to lists" in text or "extend lists" in text):
                    raise Unsupported(text) from None
                kinds[refused[0]] = _DictStandIn if "SETITEM" in text else _ListStandIn


@contextlib.contextmanager
def _allowed(kinds: dict[str, type]) -> Iterator[None]:
    """Make each name refer to a stand-in for torch's unpickler; names of nested classes are added to `kinds`."""
    made: dict[str, Any] = {name: _made(name, kind) for name, kind in kinds.items()}

    def within(owner: Any, name: Any) -> Any:
        """Replace `getattr`, with which pickle looks up nested classes and methods."""
        kind = owner if isinstance(owner, type) else type(owner)
        full = f"{kind.name if issubclass(kind, _StandIn) else global_name(kind)}.{name}"
        if kind is owner and full in of_user:
            return of_user[full]
        if full not in made:
            made[full] = _made(full, kinds.setdefault(full, _StandIn))
            context.enter_context(torch.serialization.safe_globals([(made[full], full)]))
        return made[full]

    if _GETATTR in made:
        made[_GETATTR] = within
    with contextlib.ExitStack() as context:
        entries = torch.serialization.get_safe_globals()
        of_user: dict[str, Any] = {
            global_name(entry): entry[0] if isinstance(entry, tuple) else entry for entry in entries
        }
        context.enter_context(torch.serialization.safe_globals([(kind, name) for name, kind in made.items()]))
        yield


def global_name(entry: Any) -> str:
    """Return the name of a class or a function in files.

    Args:
        entry: an entry of `torch.serialization.get_safe_globals`.
    """
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


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
