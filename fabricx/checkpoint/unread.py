"""Placeholder of an object that the reader of a checkpoint had no permission to read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, NoReturn, final

from fabricx.errors import CheckpointError
from fabricx.redaction import printable

PERMISSION: Final = (
    "pass weights_only=False to the call that loads it (trainer.fit, validate, test, predict, load_from_checkpoint)"
)


@final
class Unread:
    """Placeholder of an object of a checkpoint that was not read; each use is a `CheckpointError`.

    Also `isinstance` is a use, so that assigning it to an attribute of a module is an error.

    Args:
        name: class of the object, or the class or function itself, with its module.
        path: path of the checkpoint.
    """

    __slots__ = ("_name", "_path")

    def __init__(self, name: str, path: object) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_path", path)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')}, not read>"

    @property
    def __class__(self) -> Any:
        _refuse(self)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        _refuse(self)

    def __getattr__(self, name: str) -> Any:
        _refuse(self)


def _refuse(unread: Any, *arguments: Any, **options: Any) -> NoReturn:
    raise CheckpointError(permission_needed({name_of(unread)}, object.__getattribute__(unread, "_path")))


for _name in (
    "bool", "bytes", "call", "complex", "contains", "delattr", "delitem", "enter", "eq", "exit", "float", "ge",
    "getitem", "gt", "index", "int", "iter", "le", "len", "lt", "ne", "next", "reduce_ex", "setattr", "setitem",
    "add", "radd", "mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "neg", "matmul", "rmatmul", "fspath",
):  # fmt: skip
    setattr(Unread, f"__{_name}__", _refuse)
Unread.__hash__ = object.__hash__  # type: ignore[method-assign]


def is_unread(value: Any) -> bool:
    """Return whether a value is the placeholder of an object; `isinstance` would be a use of it.

    Args:
        value: any value.
    """
    return type(value) is Unread


def name_of(unread: Any) -> str:
    """Return the class of an object that was not read.

    Args:
        unread: an `Unread`.
    """
    return str(object.__getattribute__(unread, "_name"))


def permission_needed(names: set[str], path: object) -> str:
    """Return the error message for objects that were not read.

    Args:
        names: their classes.
        path: path of the checkpoint.
    """
    listed = printable(", ".join(sorted(names))).replace("\n", " ")
    return (
        f"{path} holds an object of {listed}, which was not read, because reading an object runs code of the file.\n"
        f"  if you trust the file, {PERMISSION}; or allow its classes by torch.serialization.add_safe_globals("
        f"[{listed}])"
    )


def names_in(value: Any) -> Iterator[str]:
    """Yield the classes of the objects in a value that were not read.

    Args:
        value: nested dicts, lists and tuples.
    """
    if is_unread(value):
        yield name_of(value)
    elif type(value) in (dict, OrderedDict):
        for item in value.values():
            yield from names_in(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from names_in(item)
