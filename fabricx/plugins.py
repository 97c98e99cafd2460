"""Resolves names to objects: built-in names, dotted paths, and entry points of other packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from fabricx.errors import did_you_mean

# The only place that knows plugins by name; as strings, so that nothing is imported before it is asked for.
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
_ONE: Final = {"strategies": "strategy", "callbacks": "callback", "loggers": "logger"}


def names(kind: str) -> list[str]:
    """Return all names of a kind ("strategies", "callbacks", "loggers"), with those that other packages register."""
    return sorted({*_BUILT_IN[kind], *_registered(kind)})


def _registered(kind: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=f"fabricx.{kind}")}


def find(kind: str, name: str) -> Any:
    """Return the class that a name or a dotted path stands for.

    Raises:
        LookupError: there is none; the message names the nearest one.
    """
    if name in _BUILT_IN[kind]:
        module, _, attribute = _BUILT_IN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    registered = _registered(kind)
    if name in registered:
        return registered[name].load()
    if "." in name:
        return _import(kind, name)
    one = _ONE[kind]
    raise LookupError(
        f"there is no {one} called {name!r}.{did_you_mean(name, names(kind))}\n"
        f"  known: {', '.join(names(kind))}\n"
        f"  your own: give its dotted path instead, e.g. {one}._target_=my_project.{one}.Mine"
    )


def _import(kind: str, path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LookupError(f"{_ONE[kind]} {path!r}: {error}; is its folder on the path?") from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, vars(found))
        raise LookupError(f"{_ONE[kind]} {path!r}: the module {module} has no {attribute!r}.{hint}")
    return getattr(found, attribute)


def build(kind: str, name: str, **options: Any) -> Any:
    """Make the plugin of a name with its options.

    Raises:
        LookupError: there is no such plugin.
        ValueError: it has no such option; the message names the nearest one.
    """
    cls = find(kind, name)
    known = inspect.signature(cls).parameters
    for option in options:
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise ValueError(
                f"{name} has no option {option!r}.{did_you_mean(option, known)}\n  known: {', '.join(known) or 'none'}"
            )
    return cls(**options)
