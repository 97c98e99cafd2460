"""Hyperparameters as data of checkpoints, loggers and configurations, and the form in which a constructor has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

import torch

_COLLECTIONS: Final = (Sequence, set, frozenset)
CLASS_PATH: Final = "_class_path"  # hyperparameter with the path of the class, where a command line selects it
INSTANTIATOR: Final = "_instantiator"  # hyperparameter that marks values in which dicts stand for objects


class AttributeDict(dict[str, Any]):
    """A dict with attributes for its keys.

    >>> hparams = AttributeDict(lr=0.1)
    >>> hparams.lr
    0.1
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no hyperparameter '{name}'.\n  known: {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def without_origin(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters without those that `LightningCLI` adds, which are no arguments.

    Args:
        hparams: by name.
    """
    return {name: value for name, value in hparams.items() if name not in (CLASS_PATH, INSTANTIATOR)}


def is_omegaconf(value: Any) -> bool:
    """Return whether a value is a dict or a list of OmegaConf, which is not imported.

    Args:
        value: any value.
    """
    return type(value).__module__.partition(".")[0] == "omegaconf"


@dataclass(frozen=True)
class Form:
    """The form of hyperparameters that a checkpoint stores beside their values, to call the constructor again.

    Attributes:
        argument: the constructor's argument that has all of them; "" if each is an argument.
        omegaconf: paths of the values that are dicts or lists of OmegaConf, by keys and indices; the empty
            path is the argument with all.
    """

    argument: str = ""
    omegaconf: tuple[tuple[Any, ...], ...] = ()

    @classmethod
    def of(cls, owner: Any) -> Form:
        """Return the form of an object's hyperparameters.

        Args:
            owner: a module or data module of fabricx or Lightning.
        """
        argument = vars(owner).get("_hparams_name")
        saved = owner.hparams
        paths = list(_omegaconf_paths(entries(saved) if is_omegaconf(saved) else saved))
        if argument and vars(owner).get("_hparams_omegaconf"):
            paths = [()]
        return cls(argument if argument and argument != "kwargs" else "", tuple(paths))

    @classmethod
    def read(cls, noted: Any) -> Form:
        """Return the form that a checkpoint has stored.

        Args:
            noted: result of `note`; any other value for a checkpoint without it.
        """
        if not isinstance(noted, Mapping):
            return cls()
        return cls(str(noted["argument"]), tuple(tuple(path) for path in noted["omegaconf"]))

    def note(self) -> dict[str, Any]:
        """Return the form as plain data."""
        return {"argument": self.argument, "omegaconf": [list(path) for path in self.omegaconf]}

    def restored(self, hparams: Mapping[str, Any]) -> dict[str, Any]:
        """Return hyperparameters of a checkpoint, with dicts and lists of OmegaConf restored.

        Args:
            hparams: as plain data.
        """
        return {name: self._restored(value, (name,)) for name, value in hparams.items()}

    def _restored(self, value: Any, path: tuple[Any, ...]) -> Any:
        if path in self.omegaconf:
            return _omegaconf(value)
        if isinstance(value, dict):
            return {name: self._restored(item, (*path, name)) for name, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._restored(item, (*path, index)) for index, item in enumerate(value))
        return value

    def whole(self, hparams: Mapping[str, Any]) -> Any:
        """Return the value of the argument that has all hyperparameters: of OmegaConf, or with keys as attributes.

        Args:
            hparams: by name.
        """
        return _omegaconf(plain_containers(dict(hparams))) if () in self.omegaconf else AttributeDict(hparams)


def _omegaconf(value: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import UnsupportedValueType

    try:
        return OmegaConf.create(value)
    except UnsupportedValueType:  # objects that hydra.utils.instantiate has made
        return OmegaConf.create(value, flags={"allow_objects": True})


def plain_containers(value: Any) -> Any:
    """Return a value without containers of OmegaConf: interpolations are resolved, and missing values are "???".

    Args:
        value: any nesting of collections.
    """
    if is_omegaconf(value):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
    if type(value) in (dict, AttributeDict):
        return {name: plain_containers(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_containers(item) for item in value)
    return value


def _omegaconf_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the outermost containers of OmegaConf in a nesting of dicts, lists and tuples."""
    if is_omegaconf(value):
        yield path
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _omegaconf_paths(item, (*path, name))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _omegaconf_paths(item, (*path, index))


def entries(config: Any) -> dict[str, Any]:
    """Return the values of a config of OmegaConf that are not missing.

    Args:
        config: a dict of OmegaConf.
    """
    from omegaconf import OmegaConf

    return {name: config[name] for name in config if not OmegaConf.is_missing(config, name)}


def is_plain(value: Any) -> bool:
    """Return whether a value and all its elements are of Python's built-in types.

    Args:
        value: any nesting of collections.
    """
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def plain(value: Any, otherwise: Callable[[Any], Any] = str) -> Any:
    """Return hyperparameters as data for JSON and YAML.

    Args:
        value: any nesting of collections.
        otherwise: converts other values; by default to their text.

    >>> plain({"sizes": (1, 2), "activation": len})
    {'sizes': [1, 2], 'activation': '<built-in function len>'}
    """
    value = plain_containers(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, otherwise) for name, item in value.items()}
    if isinstance(value, _COLLECTIONS) and not isinstance(value, (str, bytes)):
        return [plain(item, otherwise) for item in value]
    value = builtin(value)
    return value if value is None or type(value) in (bool, int, float, str) else otherwise(value)


def builtin(value: Any) -> Any:
    """Return a number or a text of a derived class (numpy, enum) as Python's own; other values as they are.

    Args:
        value: a single value.
    """
    if isinstance(value, Enum) and isinstance(value, (int, float, str)):
        value = value.value
    item = getattr(value, "item", None)
    if not isinstance(value, (bool, int, float, str)) and getattr(value, "shape", None) == () and callable(item):
        value = item()  # of numpy or torch; other objects, such as environments, have a shape, too
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def storable(
    hparams: Mapping[str, Any], stores: Callable[[Any], bool] = lambda value: False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the hyperparameters that a checkpoint can store, and the classes of all other hyperparameters by name.

    >>> storable({"sizes": (1, 2), "names": {0: "a"}, "activation": len})
    ({'sizes': (1, 2), 'names': {0: 'a'}}, {'activation': 'builtin_function_or_method'})

    Args:
        hparams: by name.
        stores: whether the checkpoint stores an object that is no plain data.
    """
    kept, others = {}, {}
    for name, value in (plain_containers(hparams) if is_omegaconf(hparams) else hparams).items():
        try:
            kept[str(name)] = _exact(plain_containers(value), stores)
        except TypeError as error:
            others[str(name)] = str(error)
    return kept, others


def _exact(value: Any, stores: Callable[[Any], bool]) -> Any:
    """Return a value of Python's types, dtypes, devices, tensors and objects that a checkpoint stores.

    Raises:
        TypeError: the value contains another object; its class is the message.
    """
    if isinstance(value, Mapping):
        return {builtin(name): _exact(item, stores) for name, item in value.items()}
    if isinstance(value, (tuple, set)):
        return (tuple if isinstance(value, tuple) else set)(_exact(item, stores) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_exact(item, stores) for item in value]
    value = str(value) if isinstance(value, PurePath) else builtin(value)
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, (torch.Tensor, torch.dtype, torch.device)) and type(value).__module__ == "torch":
        return value
    if stores(value):
        return value
    raise TypeError(type(value).__name__)
