"""Classes that the hyperparameters of `LightningCLI` name, which only a trusted checkpoint may let create."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, TypeVar

from fabricx.core.hparams import CLASS_PATH
from fabricx.errors import CheckpointError

T = TypeVar("T")
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_DATA: Final = (str, int, float, complex, bool, bytes, type(None), list, dict, tuple, set, PurePath, Enum)


def check_classes(paths: set[str], path: Any, remedy: str = "pass weights_only=False") -> None:
    """Refuse to create objects of classes that only a checkpoint names.

    Args:
        paths: paths of the classes.
        path: path of the checkpoint.
        remedy: what to do if the file is trusted.

    Raises:
        CheckpointError: there are such classes.
    """
    if paths:
        raise CheckpointError(
            f"{path} has hyperparameters that name classes to create: {', '.join(sorted(paths))}. A constructor can "
            f"run any code: {remedy} for a file that you trust"
        )


def classes_named(cls: type, hparams: Mapping[str, Any]) -> set[str]:
    """Return the paths of the classes and functions that hyperparameters name.

    >>> class Net:
    ...     def __init__(self, layer: object, size: int, name: str) -> None: ...
    >>> classes_named(Net, {"layer": {"class_path": "torch.nn.Linear"}, "size": 1, "name": "a.b"})
    {'torch.nn.Linear'}

    Args:
        cls: class whose constructor has the hyperparameters as arguments.
        hparams: by name.
    """
    hints = _hints(cls)
    functions = {
        value
        for name, value in hparams.items()
        if isinstance(value, str) and _PATH.fullmatch(value) and not _is_data(hints.get(name, object))
    }
    return functions | set(_class_paths(hparams))


def _class_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(named := value.get("class_path"), str):
            yield named
        for item in value.values():
            yield from _class_paths(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _class_paths(item)


def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the arguments of a class's constructor and those of its base classes."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        try:
            hints |= typing.get_type_hints(base.__init__)  # type: ignore[misc]
        except (NameError, TypeError):  # names that exist for type checkers only
            constructor: Any = base.__dict__.get("__init__")
            hints |= dict.fromkeys(getattr(constructor, "__annotations__", ()), object)
    return hints


def _is_data(hint: Any) -> bool:
    """Return whether values of a type can be no classes, functions or other objects."""
    if args := typing.get_args(hint):
        return all(_is_data(arg) for arg in args if arg is not ... and not isinstance(arg, str))
    return hint is Any or (isinstance(hint, type) and issubclass(hint, _DATA))


def derived(cls: type[T], path: str) -> type[T] | None:
    """Return an imported class with a path, if it is derived from `cls` or is `cls`.

    Args:
        cls: the base class.
        path: module and name.
    """
    if path == f"{cls.__module__}.{cls.__qualname__}":
        return cls
    return next((match for below in cls.__subclasses__() if (match := derived(below, path))), None)


def instantiate_module(class_type: type[T], config: Mapping[str, Any]) -> T:
    """Create a module or data module from hyperparameters.

    Args:
        class_type: class of the module, or its base class if `config` has the path of a class.
        config: hyperparameters, in which dicts with the key "class_path" stand for objects.

    Raises:
        ImportError: jsonargparse is not installed.
    """
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError(
            "the checkpoint was written by a program with LightningCLI; jsonargparse reads its hyperparameters: pip "
            "install 'fabricx[cli]'"
        ) from error
    parser = ArgumentParser(exit_on_error=False)
    values = {name: value for name, value in config.items() if name != CLASS_PATH}
    if CLASS_PATH in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": config[CLASS_PATH], "dict_kwargs": values}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    module: T = parser.instantiate(parser.parse_object({"module": values})).module
    return module
