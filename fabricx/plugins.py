"""Resolve names of plugins to classes: built-in names, dotted paths, and entry points of packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from fabricx.errors import did_you_mean

# The only module with names of plugins; as strings, so that a plugin is imported only when it is used.
_BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "strategies": {
        "async_sgd": "fabricx.strategies.async_sgd:AsyncSGD",
        "single": "fabricx.strategies.single:Single",
        "ddp": "fabricx.strategies.ddp:DDP",
        "fsdp": "fabricx.strategies.fsdp:FSDP",
        "local_sgd": "fabricx.strategies.local_sgd:LocalSGD",
        "reproducible": "fabricx.strategies.reproducible:Reproducible",
        "parameter_server": "fabricx.strategies.parameter_server:ParameterServer",
    },
    "callbacks": {
        "device_stats_monitor": "fabricx.callbacks.device_stats_monitor:DeviceStatsMonitor",
        "early_stopping": "fabricx.callbacks.early_stopping:EarlyStopping",
        "ema": "fabricx.callbacks.ema:EMA",
        "fault_recovery": "fabricx.callbacks.fault_recovery:FaultRecovery",
        "gradient_accumulation": "fabricx.callbacks.gradient_accumulation:GradientAccumulation",
        "load_balancer": "fabricx.callbacks.load_balancer:LoadBalancer",
        "learning_rate_monitor": "fabricx.callbacks.learning_rate_monitor:LearningRateMonitor",
        "model_checkpoint": "fabricx.callbacks.model_checkpoint:ModelCheckpoint",
        "model_summary": "fabricx.callbacks.model_summary:ModelSummary",
        "profiler": "fabricx.callbacks.profiler:Profiler",
        "progress_bar": "fabricx.callbacks.progress_bar:ProgressBar",
        "timer": "fabricx.callbacks.timer:Timer",
        "tracing": "fabricx.callbacks.tracing:Tracing",
    },
    "loggers": {
        "csv": "fabricx.loggers.csv:CSVLogger",
        "jsonl": "fabricx.loggers.jsonl:JSONLogger",
        "tensorboard": "fabricx.loggers.tensorboard:TensorBoardLogger",
    },
}
_SINGULAR: Final = {"strategies": "strategy", "callbacks": "callback", "loggers": "logger"}
_KEYS: Final = {"strategies": "strategy", "callbacks": "+callbacks.mine", "loggers": "+logger.mine"}  # + adds an entry


def names(kind: str) -> list[str]:
    """Return all names of a kind, including names that other packages register.

    Args:
        kind: "strategies", "callbacks" or "loggers".
    """
    return sorted({*_BUILT_IN[kind], *_registered(kind)})


def _registered(kind: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=f"fabricx.{kind}")}


def find(kind: str, name: str) -> Any:
    """Return the class of a name or dotted path.

    Args:
        kind: "strategies", "callbacks" or "loggers".
        name: registered name, or dotted path of a class.

    Raises:
        LookupError: no such class; the message contains the nearest name.
    """
    if name in _BUILT_IN[kind]:
        module, _, attribute = _BUILT_IN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    registered = _registered(kind)
    if name in registered:
        return registered[name].load()
    if "." in name:
        return _import(kind, name)
    singular = _SINGULAR[kind]
    raise LookupError(
        f"there is no {singular} called {name!r}.{did_you_mean(name, names(kind))}\n"
        f"  known: {', '.join(names(kind))}\n"
        f"  your own: give its dotted path instead, e.g. {_KEYS[kind]}._target_=my_project.{singular}.Mine"
    )


def _import(kind: str, path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LookupError(
            f"{_SINGULAR[kind]} {path!r}: {error}; start the program in its folder, or add the folder to PYTHONPATH"
        ) from error
    if not hasattr(imported, attribute):
        hint = did_you_mean(attribute, vars(imported))
        raise LookupError(f"{_SINGULAR[kind]} {path!r}: the module {module} has no {attribute!r}.{hint}")
    return getattr(imported, attribute)


def build(kind: str, name: str, **options: Any) -> Any:
    """Create a plugin.

    Args:
        kind: "strategies", "callbacks" or "loggers".
        name: registered name, or dotted path of a class.
        **options: arguments of the class.

    Raises:
        LookupError: no such plugin.
        ValueError: the plugin has no such option; the message contains the nearest option.
    """
    cls = find(kind, name)
    valid = inspect.signature(cls).parameters
    for option in options:
        if option not in valid and not any(p.kind is p.VAR_KEYWORD for p in valid.values()):
            raise ValueError(
                f"{name} has no option {option!r}.{did_you_mean(option, valid)}\n  known: {', '.join(valid) or 'none'}"
            )
    return cls(**options)
