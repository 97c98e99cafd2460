"""Objects that `LightningCLI` creates from a configuration: modules with their hyperparameters, optimizers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fabricx.checkpoint.hyperparameters import CLASS_PATH
from fabricx.core.hparams import given_hyperparameters


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Create an object.

    Args:
        args: positional argument of the constructor, or a tuple of them.
        init: dict with the keys "class_path" and "init_args".
    """
    module, _, name = init["class_path"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return cls(*(args if isinstance(args, tuple) else (args,)), **init.get("init_args", {}))


class Instantiator:
    """Creates a module or data module whose `save_hyperparameters` saves the values of the configuration.

    Args:
        values: returns the configuration.
        key: "model" or "data".
    """

    def __init__(self, values: Callable[[], Mapping[str, Any]], key: str) -> None:
        self._values, self._key = values, key

    def __call__(
        self, class_type: Callable[..., Any], *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
    ) -> Any:
        """Create the object.

        Args:
            class_type: class of the object.
            *args: arguments of its constructor.
            applied_instantiation_links: arguments that other objects have set, by their name in the configuration.
            **kwargs: arguments of its constructor.
        """
        hparams = dict(self._values().get(self._key) or {})
        if "class_path" in hparams:
            hparams = {
                CLASS_PATH: hparams["class_path"],
                **(hparams.get("init_args") or {}),
                **(hparams.get("dict_kwargs") or {}),
            }
        for name, value in applied_instantiation_links.items():
            if name.startswith(f"{self._key}."):
                _set(hparams, name.removeprefix(f"{self._key}.").removeprefix("init_args.").split("."), value)
        with given_hyperparameters(class_type, hparams):
            return class_type(*args, **kwargs)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        values = values[name]
    values[path[-1]] = value


class ConfiguredOptimizers:
    """A module's `configure_optimizers` that creates the optimizer and the schedule of the configuration.

    Args:
        module: the module.
        configure: returns the result of `configure_optimizers` for (module, optimizer, schedule).
        optimizer, schedule: dicts with the keys "class_path" and "init_args"; the schedule's can be empty.
    """

    def __init__(
        self, module: Any, configure: Callable[..., Any], optimizer: Mapping[str, Any], schedule: Mapping[str, Any]
    ) -> None:
        self._module, self._configure, self._optimizer, self._schedule = module, configure, optimizer, schedule

    def __call__(self) -> Any:
        """Return the optimizer and the schedule."""
        optimizer = instantiate_class(self._module.parameters(), self._optimizer)
        schedule = instantiate_class(optimizer, self._schedule) if self._schedule else None
        return self._configure(self._module, optimizer=optimizer, lr_scheduler=schedule)


def class_of(factory: Any) -> Any:
    """Return a class, or the class of the objects that a function returns.

    Args:
        factory: a class, or a function with an annotated result.
    """
    return factory if isinstance(factory, type) else inspect.signature(factory, eval_str=True).return_annotation
