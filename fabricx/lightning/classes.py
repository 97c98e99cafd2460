"""Classes that derive from a user's class and from a contract of fabricx, whose methods precede Lightning's."""

from __future__ import annotations

import copyreg
import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")  # the same classes under two names, which are not equal
_ADAPTED: Final[weakref.WeakValueDictionary[type, type]] = weakref.WeakValueDictionary()
_FORMED: Final[dict[str, Callable[[type], type]]] = {}  # by kind: returns the adapted class of a user's class


def lightning_base(cls: type, name: str) -> type | None:
    """Return Lightning's class from which a class derives; None if it doesn't, also where Lightning is not imported.

    Args:
        cls: any class.
        name: name of a class of `lightning.pytorch`, such as "LightningModule"; "callbacks.Timer" for a submodule.
    """
    for package in PACKAGES:
        folder, _, attribute = f"{package}.{name}".rpartition(".")
        base = getattr(sys.modules.get(folder), attribute, None)
        if isinstance(base, type) and issubclass(cls, base):
            return base
    return None


def is_lightning(cls: type) -> bool:
    """Return whether a class is a part of Lightning, and not of a user's program.

    Args:
        cls: any class.
    """
    package = cls.__module__.partition(".")[0]
    return package in ("lightning", "pytorch_lightning") and ".demos." not in cls.__module__


class Absent:
    """Hides an attribute of later base classes; an attribute of the object has precedence."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(f"{(owner or type(instance)).__name__} has no {self._name}")


class _First:
    """First base class where the user's class has `__init_subclass__`, which may require arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def local_name(name: str) -> str:
    """Return the qualified name of a bridge: of a local class, whose subclasses are no choices of a command line.

    A command line accepts the short names of subclasses of a contract, and the adapted class of a user's or
    Lightning's class has the same name as that class.

    Args:
        name: of the bridge.
    """
    return f"adapted_class.<locals>.{name}"


def _class(kind: str, cls: type) -> type:
    return _FORMED[kind](cls)


def _new(kind: str, cls: type, *arguments: Any) -> Any:
    adapted = _FORMED[kind](cls)
    return adapted.__new__(adapted, *arguments)


def _restore(kind: str, made: Callable[..., Any], arguments: Any) -> Any:
    value = made(*arguments)
    value.__class__ = _FORMED[kind](type(value))
    return value


def form(kind: str) -> Callable[[Callable[[type], type]], Callable[[type], type]]:
    """Return a decorator of the function that forms the adapted class of a user's class; its results are cached.

    Args:
        kind: name of the function in pickles; workers call it with the same class.
    """

    def decorate(function: Callable[[type], type]) -> Callable[[type], type]:
        @functools.wraps(function)
        def cached(cls: type) -> type:
            if "_adapted_from" in vars(cls):
                return cls
            adapted = _ADAPTED.get(cls)
            if adapted is None:
                adapted = _ADAPTED[cls] = function(cls)
                adapted._adapted_from = kind, cls  # type: ignore[attr-defined]
                adapted.__by_value__ = _class, (kind, cls)  # type: ignore[attr-defined]
            return adapted

        _FORMED[kind] = cached
        return cached

    return decorate


def adapted_class(cls: type, bridge: type, namespace: Mapping[str, Any] | None = None) -> type:
    """Return a class whose methods are those of the user, then of the bridge, then of Lightning.

    The bridge derives from the contract of fabricx and from Lightning's class, in this order. Python's order of base
    classes (C3) then has the bridge directly before Lightning's class: calls of `super()` in the user's classes reach
    fabricx, and objects remain instances of the user's and of Lightning's class.

    Args:
        cls: the user's class; derives from Lightning's class, or is that class.
        bridge: its second base class is that of Lightning; without that base, its methods come last.
        namespace: attributes that precede those of the user's class.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        # By the user's class, which workers adapt again: a class without an importable name cannot be unpickled.
        reduced: Any = super(adapted, self).__reduce_ex__(max(2, protocol))  # type: ignore[arg-type]
        function, arguments, *state = reduced
        kind, users = type(self)._adapted_from
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _new, (kind, users, *arguments[1:]), *state
        return _restore, (kind, function, arguments), *state  # by a `__reduce__` of the user's class

    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **(namespace or {})}
    body["__reduce_ex__"] = reduce
    # The first base class determines the layout of objects, which has to be that of the user's class.
    bases: tuple[type, ...] = (bridge,) if issubclass(bridge, cls) else (cls, bridge)
    if any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1]):
        bases = (_First, *bases)
    adapted: type = types.new_class(cls.__name__, bases, exec_body=lambda empty: empty.update(body))
    return adapted
