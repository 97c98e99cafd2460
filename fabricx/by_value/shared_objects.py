"""Objects that a worker and the process that started it both have: a result refers to them by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

_Named = Mapping[int, tuple[str, Any]]  # by `id`; the objects are kept, so that their numbers remain theirs
_NAMES: Final[ContextVar[_Named]] = ContextVar("_NAMES")


def share(named: Iterable[tuple[str, Any]]) -> None:
    """Send these objects by name, from now on, to the process that started this process.

    Args:
        named: objects with the names that they have in the receiver; the receiver has one object of each name.
    """
    _NAMES.set({id(value): (name, value) for name, value in named})


@contextmanager
def shared_objects(named: Mapping[str, Any]) -> Iterator[None]:
    """Context in which names in results stand for these objects, and results that are sent have these names.

    Args:
        named: objects of this process by name.
    """
    token = _NAMES.set({id(value): (name, value) for name, value in named.items()})
    try:
        yield
    finally:
        _NAMES.reset(token)


def names() -> _Named:
    """Return the shared objects with their names, by `id`."""
    return _NAMES.get({})


def find(name: str) -> Any:
    """Return the object of this process with a name.

    Args:
        name: of a shared object.
    """
    return next(value for known, value in names().values() if known == name)
