"""Hyperparameters of objects: `self.save_hyperparameters()` and `self.hparams`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from fabricx.checkpoint.hyperparameters import INSTANTIATOR, AttributeDict, is_omegaconf, is_plain
from fabricx.errors import PossibleUserWarning

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
