"""Hyperparameters as plain data: `self.save_hyperparameters()` and `self.hparams`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fabricx.errors import PossibleUserWarning

_COLLECTIONS: Final = (Sequence, set, frozenset)
CLASS_PATH: Final = "_class_path"  # hyperparameter with the path of the class, where a command line selects it
INSTANTIATOR: Final = "_instantiator"  # hyperparameter that marks values in which dicts stand for objects
_GIVEN: ContextVar[tuple[Any, dict[str, Any]] | None] = ContextVar("given hyperparameters", default=None)


@contextlib.contextmanager
def given_hyperparameters(cls: Any, hparams: dict[str, Any]) -> Iterator[None]:
    """Let `save_hyperparameters` of an object save other values than the arguments of its constructor.

    Args:
        cls: class of the object.
        hparams: values of a configuration, in which dicts with the key "class_path" stand for objects.
    """
    token = _GIVEN.set((cls, {**hparams, INSTANTIATOR: "fabricx.pytorch.cli.instantiate_module"}))
    try:
        yield
    finally:
        _GIVEN.reset(token)


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


class HyperParameters:
    """Records the arguments of an object's constructor for checkpoints and loggers."""

    @property
    def hparams(self) -> AttributeDict:
        """Return the hyperparameters; later checkpoints save changes of them.

        After `save_hyperparameters(config)` with a config of OmegaConf it is this config.
        """
        hparams: AttributeDict | None = self.__dict__.get("_hparams")
        if hparams is None:
            hparams = self.__dict__["_hparams"] = AttributeDict()
        return hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """Return a copy of the hyperparameters at the call of `save_hyperparameters`."""
        saved: AttributeDict = self.__dict__.get("_hparams_initial", AttributeDict())
        return copy.deepcopy(saved)

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: Iterable[str] | str = (),
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of the calling `__init__` in `self.hparams`.

        Args:
            names: arguments to save; all by default. Alternatively a single dict or namespace with the values.
            ignore: names of arguments not to save, such as a network.
            frame: frame with the arguments as local variables; by default the caller's.
            logger: whether loggers receive the hyperparameters.

        Raises:
            ValueError: no argument has such a name.
        """
        arguments = _given_to(self)
        if arguments is None:
            arguments = _init_arguments(frame or inspect.currentframe().f_back, self)  # type: ignore[union-attr]
        dropped = {ignore} if isinstance(ignore, str) else set(ignore)
        self.remove_ignored_hparams(dropped)
        whole: str | None = None  # argument that has all hyperparameters
        if len(names) == 1 and isinstance(names[0], (Mapping, Namespace)):
            values = _mapping(names[0])
            whole = next((name for name, value in arguments.items() if _same(_mapping(value), values)), None)
            self.__dict__["_hparams_omegaconf"] = whole is not None and is_omegaconf(arguments[whole])
            arguments = {} if is_omegaconf(values) and self._adopt_config(values, dropped) else dict(values)
        elif names:
            unknown = [name for name in names if name not in arguments]
            if unknown:
                raise ValueError(
                    f"save_hyperparameters({unknown[0]!r}): there is no such argument.\n  known: {list(arguments)}"
                )
            arguments = {name: arguments[name] for name in names}
        self.__dict__["_hparams_name"] = whole  # Lightning's attribute
        kept = {name: value for name, value in arguments.items() if name not in dropped}
        if kept and is_omegaconf(self.hparams):  # of an earlier call
            self.__dict__["_hparams"] = AttributeDict(self.hparams)
        modules = [name for name, value in kept.items() if isinstance(value, nn.Module)]
        if modules:
            warnings.warn(
                f"save_hyperparameters: {modules[0]!r} is an instance of `nn.Module` and is already saved with the "
                "weights; as a hyperparameter its whole object is pickled, and load_from_checkpoint needs "
                f"weights_only=False. Call self.save_hyperparameters(ignore={modules}), and pass it to "
                "load_from_checkpoint",
                PossibleUserWarning,
                stacklevel=2,
            )
        self.hparams.update(kept)
        initial: Any = self.hparams  # earlier calls included, such as that of a base class
        copied = copy.deepcopy(initial) if is_omegaconf(initial) or is_plain(initial) else AttributeDict(initial)
        self.__dict__["_hparams_initial"] = copied
        self.__dict__["_log_hyperparams"] = logger

    def _adopt_config(self, config: Any, dropped: set[str]) -> bool:
        """Store a config of OmegaConf as the hyperparameters, because functions of OmegaConf need its class.

        Args:
            config: the config.
            dropped: keys of it that are not saved.

        Returns:
            False, without an effect, if an earlier call has saved other hyperparameters.
        """
        config = _without(config, dropped)
        if not set(self.hparams) <= set(config):
            return False
        self.__dict__["_hparams"] = config
        return True

    def remove_ignored_hparams(self, ignore_list: Iterable[str]) -> None:
        """Remove hyperparameters that an earlier call has saved, such as the call of a base class.

        Args:
            ignore_list: their names.
        """
        if is_omegaconf(self.hparams):
            self.__dict__["_hparams"] = _without(self.hparams, set(ignore_list))
            return
        for name in ignore_list:
            self.hparams.pop(name, None)


def without_origin(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters without those that `LightningCLI` adds, which are no arguments.

    Args:
        hparams: by name.
    """
    return {name: value for name, value in hparams.items() if name not in (CLASS_PATH, INSTANTIATOR)}


def _given_to(owner: object) -> dict[str, Any] | None:
    """Return the values of `given_hyperparameters` for an object; None without."""
    configured = _GIVEN.get()
    return (
        None
        if configured is None or (isinstance(configured[0], type) and type(owner) is not configured[0])
        else dict(configured[1])
    )


def _mapping(value: Any) -> Any:
    """Return the variables of a namespace; other values as they are."""
    return vars(value) if isinstance(value, Namespace) else value


def _entries(config: Any) -> dict[str, Any]:
    """Return the values of a config of OmegaConf that are not missing."""
    from omegaconf import OmegaConf

    return {name: config[name] for name in config if not OmegaConf.is_missing(config, name)}


def _without(config: Any, dropped: set[str]) -> Any:
    """Return a config of OmegaConf without some keys; the same object if it lacks them all."""
    if not dropped & set(config):
        return config
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(config, [name for name in config if name not in dropped])


def _same(value: Any, argument: Any) -> bool:
    if value is argument or not isinstance(value, Mapping):
        return value is argument
    try:
        return bool(value == argument)
    except (ValueError, RuntimeError):  # arrays and tensors have no truth value
        return False


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
        paths = list(_omegaconf_paths(_entries(saved) if is_omegaconf(saved) else saved))
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


def _init_arguments(caller: FrameType | None, owner: Any) -> dict[str, Any]:
    """Collect the arguments of every `__init__` of an object that is running, of which the outermost count."""
    collected: dict[str, Any] | None = None
    frame = caller
    while frame is not None:
        if frame.f_code.co_name == "__init__" and _receiver(frame) is owner:
            info = inspect.getargvalues(frame)
            names = info.args[1:] if frame.f_code.co_argcount else info.args
            arguments = {name: info.locals[name] for name in names if name in info.locals}
            if info.keywords:
                arguments.update(info.locals.get(info.keywords, {}))
            collected = {**(collected or {}), **arguments}
        frame = frame.f_back
    # A function's frame (dataclass-like use): its variables with the names of parameters of the class's `__init__`.
    if collected is None:
        known = inspect.signature(type(owner)).parameters
        collected = {name: value for name, value in (caller.f_locals if caller else {}).items() if name in known}
    return collected


def _receiver(frame: FrameType) -> Any:
    """Return the object whose method runs: the first argument, of any name."""
    info = inspect.getargvalues(frame)
    if frame.f_code.co_argcount:
        return info.locals.get(info.args[0])
    return next(iter(info.locals.get(info.varargs or "", ())), None)


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


if TYPE_CHECKING:
    of_class = classmethod
else:

    class of_class(classmethod):  # noqa: N801 - a decorator
        """A class method that refuses calls on an object, which would discard the result."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return super().__get__(None, owner)
            return functools.partial(_refuse_object, self, instance)


def _refuse_object(method: Any, instance: Any, *args: Any, **options: Any) -> None:
    name, cls = method.__func__.__name__, type(instance).__name__
    raise TypeError(
        f"{name} creates a new object and leaves the object that it was called on unchanged: "
        f"write new = {cls}.{name}(...)"
    )
