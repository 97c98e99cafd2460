"""Resolve names of plugins to classes: built-in names, dotted paths, and entry points of packages."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final

from fabricx.errors import UnknownName, did_you_mean

# The only module with names of plugins; as strings, so that a plugin is imported only when it is used.
_BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "strategies": {
        "async_sgd": "fabricx.strategies.async_sgd:AsyncSGD",
        "single": "fabricx.strategies.single:Single",
        "ddp": "fabricx.strategies.ddp:DDP",
        "fsdp": "fabricx.strategies.fsdp:FSDP",
        "local_sgd": "fabricx.strategies.local_sgd:LocalSGD",
        "context": "fabricx.strategies.mesh_presets:ContextMesh",
        "expert": "fabricx.strategies.mesh_presets:ExpertMesh",
        "mesh": "fabricx.strategies.mesh:Mesh",
        "pipeline": "fabricx.strategies.mesh_presets:PipelineMesh",
        "tensor": "fabricx.strategies.mesh_presets:TensorMesh",
        "reproducible": "fabricx.strategies.reproducible:Reproducible",
        "parameter_server": "fabricx.strategies.parameter_server:ParameterServer",
    },
    "callbacks": {
        "backbone_finetuning": "fabricx.callbacks.finetuning:BackboneFinetuning",
        "batch_size_finder": "fabricx.callbacks.batch_size_finder:BatchSizeFinder",
        "device_stats_monitor": "fabricx.callbacks.device_stats_monitor:DeviceStatsMonitor",
        "early_stopping": "fabricx.callbacks.early_stopping:EarlyStopping",
        "ema": "fabricx.callbacks.ema:EMA",
        "fault_recovery": "fabricx.callbacks.fault_recovery:FaultRecovery",
        "gradient_accumulation": "fabricx.callbacks.gradient_accumulation:GradientAccumulation",
        "learning_rate_finder": "fabricx.callbacks.lr_finder:LearningRateFinder",
        "load_balancer": "fabricx.callbacks.load_balancer:LoadBalancer",
        "learning_rate_monitor": "fabricx.callbacks.learning_rate_monitor:LearningRateMonitor",
        "model_checkpoint": "fabricx.callbacks.model_checkpoint:ModelCheckpoint",
        "model_summary": "fabricx.callbacks.model_summary:ModelSummary",
        "on_exception_checkpoint": "fabricx.callbacks.on_exception_checkpoint:OnExceptionCheckpoint",
        "profiler": "fabricx.callbacks.profiler:Profiler",
        "progress_bar": "fabricx.callbacks.progress_bar:ProgressBar",
        "stochastic_weight_averaging": ("fabricx.callbacks.stochastic_weight_averaging:StochasticWeightAveraging"),
        "timer": "fabricx.callbacks.timer:Timer",
        "tracing": "fabricx.callbacks.tracing:Tracing",
        "validation_interval": "fabricx.callbacks.validation_interval:ValidationInterval",
    },
    "loggers": {
        "comet": "fabricx.loggers.comet:CometLogger",
        "mlflow": "fabricx.loggers.mlflow:MLFlowLogger",
        "neptune": "fabricx.loggers.neptune:NeptuneLogger",
        "wandb": "fabricx.loggers.wandb:WandbLogger",
        "csv": "fabricx.loggers.csv:CSVLogger",
        "jsonl": "fabricx.loggers.jsonl:JSONLogger",
        "tensorboard": "fabricx.loggers.tensorboard:TensorBoardLogger",
    },
    "launchers": {
        "kubernetes": "fabricx.launchers.kubernetes:Kubernetes",
        "ray": "fabricx.launchers.ray:Ray",
        "slurm": "fabricx.launchers.slurm:Slurm",
    },
}
_SINGULAR: Final = {"strategies": "strategy", "callbacks": "callback", "loggers": "logger", "launchers": "launcher"}
_KEYS: Final = {  # + adds an entry
    "strategies": "strategy", "callbacks": "+callbacks.mine", "loggers": "+logger.mine", "launchers": "launcher",
}  # fmt: skip


def names(kind: str) -> list[str]:
    """Return all names of a kind, including names that other packages register.

    Args:
        kind: "strategies", "callbacks", "loggers" or "launchers".
    """
    return sorted({*_BUILT_IN[kind], *registered(kind)})


def registered(kind: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of other packages, by name.

    Args:
        kind: "strategies", "callbacks", "loggers", "launchers" or "codecs".
    """
    return {entry.name: entry for entry in metadata.entry_points(group=f"fabricx.{kind}")}


def modules(kind: str) -> list[str]:
    """Return the names of the modules with fabricx's own plugins of a kind, for imports ahead of their use.

    Args:
        kind: "strategies", "callbacks", "loggers" or "launchers".
    """
    return sorted({path.partition(":")[0] for path in _BUILT_IN[kind].values()})


def path_of(kind: str, name: str) -> str:
    """Return the path of a plugin's class as MODULE:CLASS, without importing it; "" for an unknown name.

    Args:
        kind: "strategies", "callbacks", "loggers" or "launchers".
        name: registered name.
    """
    if name in _BUILT_IN[kind]:
        return _BUILT_IN[kind][name]
    entry = registered(kind).get(name)
    return entry.value if entry is not None else ""


def find(kind: str, name: str) -> Any:
    """Return the class of a name or dotted path.

    Args:
        kind: "strategies", "callbacks", "loggers" or "launchers".
        name: registered name, or dotted path of a class.

    Raises:
        LookupError: no such class; the message contains the nearest name.
    """
    if name in _BUILT_IN[kind]:
        module, _, attribute = _BUILT_IN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    entries = registered(kind)
    if name in entries:
        return entries[name].load()
    if "." in name:
        return load(_SINGULAR[kind], name)
    singular = _SINGULAR[kind]
    raise UnknownName(
        f"there is no {singular} called {name!r}.{did_you_mean(name, names(kind))}\n"
        f"  known: {', '.join(names(kind))}\n"
        f"  your own: give its dotted path instead, e.g. {_KEYS[kind]}._target_=my_project.{singular}.Mine"
    )


def load(where: str, path: str) -> Any:
    """Import the object at a dotted path.

    Args:
        where: the option with the path, for messages.
        path: such as "my_project.models.Net".

    Raises:
        LookupError: there is no such module or object; the message contains the nearest name. An error within an
            imported module is raised unchanged.
    """
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise LookupError(f"{where}={path}: write the module and the class, such as my_project.models.Net")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            imported = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module imports another module, which is missing
        else:
            break
    else:
        raise LookupError(
            f"{where}={path} can't be imported: there is no module {parts[0]!r}."
            f"{did_you_mean(parts[0], _modules([os.getcwd()]))}\n"
            "  modules are imported from the current folder and from installed packages: start the command in your "
            "project's folder, or add the folder to PYTHONPATH"
        )
    for attribute in parts[length:]:
        if not hasattr(imported, attribute):
            near = did_you_mean(attribute, [*vars(imported), *_modules(getattr(imported, "__path__", []))])
            raise LookupError(
                f"{where}={path} can't be imported: {getattr(imported, '__name__', imported)} has no "
                f"{attribute!r}.{near}"
            )
        imported = getattr(imported, attribute)
    return imported


def _modules(folders: Iterable[str]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(list(folders))]


def build(kind: str, name: str, **options: Any) -> Any:
    """Create a plugin.

    Args:
        kind: "strategies", "callbacks", "loggers" or "launchers".
        name: registered name, or dotted path of a class.
        **options: arguments of the class.

    Raises:
        LookupError: no such plugin.
        ValueError: the plugin has no such option; the message contains the nearest option.
    """
    cls = find(kind, name)
    valid = inspect.signature(cls).parameters
    for option in options:
        if former := getattr(cls, "former_arguments", {}).get(option):
            raise ValueError(f"{name} has no option {option!r}: {former}")
        if option not in valid and not any(p.kind is p.VAR_KEYWORD for p in valid.values()):
            raise ValueError(
                f"{name} has no option {option!r}.{did_you_mean(option, valid)}\n  known: {', '.join(valid) or 'none'}"
            )
    return cls(**options)
