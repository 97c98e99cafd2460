"""Objects from the hyperparameters of `LightningCLI`; classes that only an untrusted checkpoint names are refused."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, TypeVar

import yaml

from fabricx.checkpoint.hyperparameters import CLASS_PATH, is_plain, plain_containers
from fabricx.errors import CheckpointError

T = TypeVar("T")
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_LONG: Final = 80  # characters of a text in an error
_TEXTS: Final = (str, int, float, complex, bool, bytes, type(None), PurePath, Enum)
_COLLECTIONS: Final = (
    typing.Union, types.UnionType, list, dict, tuple, set, abc.Sequence, abc.Iterable, abc.Mapping, abc.Collection,
)  # fmt: skip
_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the syntax of jsonargparse, without types


def check_classes(paths: set[str], path: Any, remedy: str = "pass weights_only=False") -> None:
    """Refuse to create objects of classes that only a checkpoint names.

    Args:
        paths: paths of the classes.
        path: path of the checkpoint.
        remedy: argument or option that trusts the file, with its verb.

    Raises:
        CheckpointError: there are such classes.
    """
    if paths:
        raise CheckpointError(
            f"{path} has hyperparameters that name classes to create: {', '.join(sorted(paths))}. A constructor can "
            f"run any code: {remedy} for a file that you trust"
        )


def classes_named(cls: type, hparams: Mapping[str, Any]) -> set[str]:
    """Return the classes and functions that hyperparameters name, or could name.

    jsonargparse also finds a class in a text of YAML or JSON, and by its name alone. A text that is the value of an
    argument for objects therefore counts, whatever its content.

    >>> class Net:
    ...     def __init__(self, layer: object, size: int, name: str) -> None: ...
    >>> classes_named(Net, {"layer": {"class_path": "torch.nn.Linear"}, "size": 1, "name": "a.b"})
    {'torch.nn.Linear'}

    Args:
        cls: class whose constructor has the hyperparameters as arguments.
        hparams: by name.
    """
    kinds = _kinds(cls)
    texts = (_classes(value, kinds.get(name, _Kind.UNKNOWN)) for name, value in hparams.items())
    return {text for names in texts for text in names} | set(_classes(hparams.get("class_path"), _Kind.OBJECTS))


class _Kind(Enum):
    """Meaning of a text that is the value of an argument."""

    TEXT = "text"
    ANYTHING = "a text, or a description of an object"
    UNKNOWN = "as ANYTHING, or the path of a class: the argument has no type"
    OBJECTS = "the name of a class, too"


def _classes(value: Any, kind: _Kind) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _classes(value.get("class_path"), _Kind.OBJECTS)
        for item in value.values():
            yield from _classes(item, kind)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _classes(item, kind)
    elif isinstance(value, str) and (kind is _Kind.OBJECTS or (kind is _Kind.UNKNOWN and _PATH.fullmatch(value))):
        yield value if len(value) < _LONG else f"{value[:_LONG]}..."
    elif isinstance(value, str) and kind is not _Kind.TEXT:
        with contextlib.suppress(yaml.YAMLError):
            content = yaml.load(value, Loader=_LOADER)  # texts, lists and dicts only
            if not isinstance(content, str):
                yield from _classes(content, kind)


def _kinds(cls: type) -> dict[str, _Kind]:
    """Return the kinds of the arguments of the constructors of a class and of its base classes, by name."""
    kinds: dict[str, _Kind] = {}
    for base in reversed(cls.__mro__):
        constructor: Any = base.__dict__.get("__init__")
        if not inspect.isfunction(constructor):
            continue
        try:
            hints = typing.get_type_hints(constructor)
        except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
            hints = dict.fromkeys(constructor.__annotations__, object)
        for name, parameter in inspect.signature(constructor).parameters.items():
            untyped = _Kind.UNKNOWN if parameter.default is parameter.empty or is_plain(parameter.default) else None
            kinds[name] = _kind(hints[name]) if name in hints else untyped or _Kind.OBJECTS
    return kinds


def _kind(hint: Any) -> _Kind:
    if hint is Any or hint in (list, dict, tuple, set):
        return _Kind.ANYTHING
    if typing.get_origin(hint) is typing.Literal or (isinstance(hint, type) and issubclass(hint, _TEXTS)):
        return _Kind.TEXT
    parts = [_kind(part) for part in typing.get_args(hint) if part is not ...]
    if not parts or typing.get_origin(hint) not in _COLLECTIONS or _Kind.OBJECTS in parts:
        return _Kind.OBJECTS
    return _Kind.ANYTHING if _Kind.ANYTHING in parts else _Kind.TEXT


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
    values = {name: plain_containers(value) for name, value in config.items() if name != CLASS_PATH}  # copies
    if CLASS_PATH in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = {"class_path": config[CLASS_PATH], "dict_kwargs": values}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    module: T = parser.instantiate(parser.parse_object({"module": values})).module
    return module
