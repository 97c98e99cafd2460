"""The argument parser of `LightningCLI`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import yaml
from jsonargparse import ArgumentParser, register_unresolvable_import_paths, set_loader
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer

from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module
from fabricx.lightning.classes import lightning_base
from fabricx.lightning.schedules import LRSchedulerTypeTuple
from fabricx.lightning.strategies import own_class
from fabricx.trainer.trainer import Trainer

register_unresolvable_import_paths(torch)  # classes whose __module__ does not contain them

AUTOMATIC: Final = "AUTOMATIC"
_PACKAGES: Final = ("lightning.pytorch.", "pytorch_lightning.")
_OPTION: Final = re.compile(r"^(--[\w.+]+=|)(?:lightning\.pytorch|pytorch_lightning)\.")
_BASES: Final[dict[type, str]] = {Module: "LightningModule", DataModule: "LightningDataModule", Callback: "Callback"}
Classes = type | tuple[type, ...]


@dataclass(frozen=True)
class Group:
    """Options of an optimizer or a schedule.

    Attributes:
        classes: the class; a tuple of base classes if the user selects a class derived from them.
        target: option that receives the group; `AUTOMATIC` if the CLI creates the object.
    """

    classes: Classes
    target: str

    @property
    def selectable(self) -> bool:
        """Return whether the user selects the class."""
        return isinstance(self.classes, tuple)

    def with_class(self, options: Any) -> Any:
        """Return options as a dict with the keys "class_path" and "init_args".

        Args:
            options: options of the group; None without.
        """
        values = options.as_dict() if hasattr(options, "as_dict") else options
        if isinstance(self.classes, tuple):
            return values
        values = dict(values or {})
        return {"class_path": f"{self.classes.__module__}.{self.classes.__name__}", "init_args": values}


class LightningArgumentParser(ArgumentParser):  # type: ignore[misc]
    """Parser of jsonargparse with the options of trainers, modules, data modules, callbacks and optimizers.

    Args:
        description: text of `--help`.
        env_prefix: prefix of environment variables.
        default_env: read environment variables.
        parser_mode: format of configuration files; the default is YAML in which paths of Lightning's classes name the
            classes of fabricx.
        *args: further arguments of `jsonargparse.ArgumentParser`.
        **kwargs: further arguments of `jsonargparse.ArgumentParser`.

    Attributes:
        callback_keys: options that are callbacks.
        optimizer_groups, lr_scheduler_groups: options of optimizers and schedules.
    """

    def __init__(
        self, *args: Any, description: str = "Lightning Trainer command line tool", env_prefix: str = "PL",
        default_env: bool = False, parser_mode: str = "fabricx", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            *args, description=description, env_prefix=env_prefix, default_env=default_env, parser_mode=parser_mode,
            **kwargs,
        )  # fmt: skip
        self.callback_keys: list[str] = []
        self.optimizer_groups: dict[str, Group] = {}
        self.lr_scheduler_groups: dict[str, Group] = {}

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Return the values of a command line; paths of Lightning's classes name the classes of fabricx.

        Args:
            args: the command line's words; None for those of this process.
            *rest: further arguments of `jsonargparse.ArgumentParser.parse_args`.
            **options: further arguments of `jsonargparse.ArgumentParser.parse_args`.
        """
        words = [_OPTION.sub(r"\1fabricx.pytorch.", word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_args(words, *rest, **options)

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the constructor's arguments of a class as options.

        Args:
            lightning_class: a class of a trainer, module, data module or callback; or a function whose annotated
                result is an object of such a class.
            nested_key: first part of the options' names.
            subclass_mode: the user selects a derived class.
            required: a class has to be selected.

        Returns:
            names of the options.

        Raises:
            ValueError: another class.
        """
        cls = lightning_class if isinstance(lightning_class, type) else class_from_function(lightning_class)
        if not issubclass(cls, Trainer) and not any(is_kind(cls, base) for base in _BASES):
            raise ValueError(
                f"cannot add arguments from: {lightning_class}. Pass a class of a Trainer, LightningModule, "
                "LightningDataModule or Callback, or a function with such a class as its annotated result"
            )
        if is_kind(cls, Callback):
            self.callback_keys.append(nested_key)
        added: Any
        if subclass_mode:
            added = self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
        else:
            creates = not issubclass(cls, Trainer)
            added = self.add_class_arguments(cls, nested_key, fail_untyped=False, instantiate=creates, sub_configs=True)
        return list(added or ())

    def add_optimizer_args(
        self, optimizer_class: Classes = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Add the options of an optimizer.

        Args:
            optimizer_class: class of the optimizer; a tuple of base classes lets the user select a derived class.
            nested_key: first part of the options' names.
            link_to: option of the module that receives the optimizer; `AUTOMATIC` creates it in
                `configure_optimizers`.

        Raises:
            TypeError: a class that is not an optimizer.
        """
        self._add_group(optimizer_class, (Optimizer,), nested_key, "params")
        self.optimizer_groups[nested_key] = Group(optimizer_class, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Classes = LRSchedulerTypeTuple, nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:  # fmt: skip
        """Add the options of a schedule.

        Args:
            lr_scheduler_class: class of the schedule; a tuple of base classes lets the user select a derived class.
            nested_key: first part of the options' names.
            link_to: see `add_optimizer_args`.

        Raises:
            TypeError: a class that is not a schedule.
        """
        self._add_group(lr_scheduler_class, LRSchedulerTypeTuple, nested_key, "optimizer")
        self.lr_scheduler_groups[nested_key] = Group(lr_scheduler_class, link_to)

    def _add_group(self, classes: Classes, bases: tuple[type, ...], key: str, skipped: str) -> None:
        for cls in classes if isinstance(classes, tuple) else (classes,):
            if not issubclass(cls, bases):
                raise TypeError(f"{cls.__name__} is not a {' or '.join(base.__name__ for base in bases)}")
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {skipped}}
        if isinstance(classes, tuple):
            self.add_subclass_arguments(classes, key, **options)
        else:
            self.add_class_arguments(classes, key, sub_configs=True, **options)

    def optimizers_and_schedules(self) -> Iterator[tuple[str, Group]]:
        """Yield the options of optimizers and schedules by name."""
        yield from self.optimizer_groups.items()
        yield from self.lr_scheduler_groups.items()

    def link_groups(self) -> None:
        """Pass each optimizer and schedule with a target to it."""
        for key, group in self.optimizers_and_schedules():
            if group.target == AUTOMATIC:
                continue
            if group.selectable:
                self.link_arguments(key, group.target)
            else:
                self.link_arguments(key, group.target, compute_fn=group.with_class)


def is_kind(cls: type, base: type) -> bool:
    """Return whether a class derives from a base class of fabricx, or from its counterpart of Lightning.

    Args:
        cls: any class.
        base: `Module`, `DataModule` or `Callback`.
    """
    return issubclass(cls, base) or lightning_base(cls, _BASES[base]) is not None


def _load(text: str) -> Any:
    """Return the content of a YAML document; paths of Lightning's classes name the classes of fabricx."""
    return _with_own_paths(_load_yaml()(text))


@functools.cache
def _load_yaml() -> Callable[[str], Any]:
    from jsonargparse import get_loader

    return get_loader("yaml")  # type: ignore[no-any-return]


def _with_own_paths(value: Any) -> Any:
    if isinstance(value, str):
        for package in _PACKAGES:
            if value.startswith(package) and " " not in value:
                return f"fabricx.pytorch.{value.removeprefix(package)}"
        return value
    if isinstance(value, Mapping):
        if (path := value.get("class_path")) and (strategy := own_class(str(path), value.get("init_args") or {})):
            return dict(zip(("class_path", "init_args"), strategy, strict=True))
        return {key: _with_own_paths(item) for key, item in value.items()}
    return [_with_own_paths(item) for item in value] if isinstance(value, list) else value


def _import_plugins() -> None:
    """Import callbacks and loggers: jsonargparse finds short names (`EarlyStopping`) of imported classes."""
    for package in (importlib.import_module("fabricx.callbacks"), importlib.import_module("fabricx.loggers")):
        for name in package.__all__:
            with contextlib.suppress(ImportError):  # a client of a logger is not installed
                getattr(package, name)


set_loader("fabricx", _load, exceptions=(yaml.YAMLError,))
_import_plugins()
