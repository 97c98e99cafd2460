"""Creates strategy, loggers and callbacks from names, flags and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from fabricx import plugins
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import check_hooks
from fabricx.core.logger import Adapted, FourMethods, Logger
from fabricx.core.options.arguments import described
from fabricx.core.options.trainer_options import LAUNCHERS
from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import Elastic, ModelParallel, as_part, check_implemented
from fabricx.launch.cluster import detect
from fabricx.launch.launcher import Launcher
from fabricx.lightning import adapt_callback, adapt_logger, adapt_strategy, known_strategy


def choose_strategy(
    strategy: str | Strategy, devices: int, num_nodes: int, *, reproducible: bool = False
) -> Strategy:  # fmt: skip
    """Return the strategy with a name; "auto" selects "single" for a single rank, and "ddp" for several ranks.

    Args:
        strategy: a name, a dotted path or a strategy.
        devices: ranks on each machine.
        num_nodes: number of machines.
        reproducible: select the strategy "reproducible" instead of "single" and "ddp"; it produces bitwise identical
            weights for any number of ranks.

    Raises:
        ValueError: the object is not a strategy, or the strategy does not support this number of ranks.
        LookupError: no strategy has this name.
    """
    ranks, options = devices * num_nodes, dict[str, Any]()
    if isinstance(strategy, str) and strategy != "auto":
        strategy, options = known_strategy(strategy)
    if reproducible and strategy in ("auto", "ddp", "single"):
        strategy, options = "reproducible", {}
    if strategy == "auto":
        strategy = "ddp" if several_ranks(devices, num_nodes) else "single"
    made = plugins.build("strategies", strategy, **options) if isinstance(strategy, str) else strategy
    chosen = adapt_strategy(made)
    if not isinstance(chosen, Strategy):
        raise ValueError(
            f"strategy={_described(strategy)} is not a fabricx.Strategy: pass a name, such as 'ddp', or an object "
            "of a class that is derived from fabricx.Strategy"
        )
    if reproducible and not chosen.traits.batch_parts:
        raise ValueError(
            "deterministic='elastic' selects the strategy 'reproducible' instead of ddp: set strategy to 'auto' or "
            f"'ddp', instead of {type(chosen).__name__}"
        )
    if chosen.traits.elastic and type(as_part(chosen, Elastic)) is Elastic:
        raise ValueError(
            f"{type(chosen).__name__} declares traits.elastic, but has no method to continue with other ranks: "
            "inherit fabricx.core.strategy_parts.Elastic and implement world_changed, or set elastic=False"
        )
    check_implemented(chosen)
    if not chosen.traits.synchronous and type(chosen).synchronize is Strategy.synchronize:
        raise ValueError(
            f"{type(chosen).__name__} declares synchronous=False, so weights differ by rank, and has no synchronize: "
            "validations would mix the ranks' weights, and checkpoints would save those of rank 0 only. Implement "
            "synchronize, which makes the weights equal on all ranks, such as their mean, and declare "
            "traits.checkpoint_averages if training continues from these weights. For local steps, declare averages, "
            "too: see docs/strategy.md"
        )
    as_part(chosen, ModelParallel).check_ranks(ranks)
    most, name = chosen.traits.max_ranks, strategy if isinstance(strategy, str) else type(chosen).__name__
    if most is not None and ranks > most:
        raise ValueError(
            f"strategy={name} supports {most} rank, but devices={devices} and num_nodes={num_nodes} "
            f"require {ranks}; set strategy='ddp', or devices=1"
        )
    return chosen


def choose_launcher(launcher: str | Launcher) -> str | Launcher:
    """Return the launcher with a name; a name of `LAUNCHERS` is returned unchanged.

    Args:
        launcher: a name, a dotted path or a launcher.

    Raises:
        ValueError: the object is not a launcher.
        LookupError: no launcher has this name.
        ModuleNotFoundError: its engine is not installed.
    """
    if launcher in LAUNCHERS:
        return launcher
    made = plugins.build("launchers", launcher) if isinstance(launcher, str) else launcher
    if not isinstance(made, Launcher):
        raise ValueError(
            f"launcher={_described(launcher)} is not a launcher: pass a name, such as 'ray', or an object of a class "
            "that is derived from fabricx.launch.launcher.Launcher"
        )
    return made


def several_ranks(devices: int, num_nodes: int) -> bool:
    """Return whether several ranks train.

    Args:
        devices: ranks on each machine.
        num_nodes: number of machines.
    """
    return devices * num_nodes > 1 or launched()


def launched() -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    world = detect()
    return world is not None and world.size > 1


def choose_loggers(logger: Any) -> list[Logger]:
    """Return a list of loggers.

    Args:
        logger: True for TensorBoard, False or None for no logger, a logger (also of Lightning), or a list of loggers.

    Raises:
        ValueError: an object does not have the methods of a logger.
    """
    if logger is True:
        return [plugins.build("loggers", "tensorboard")]
    if not logger:
        return []
    loggers: list[Logger] = []
    for candidate in map(adapt_logger, listed(logger)):
        if isinstance(candidate, type) or not isinstance(candidate, (Logger, FourMethods)):
            raise ValueError(
                f"logger={_described(candidate)} is not a logger: pass an object such as "
                "fabricx.loggers.CSVLogger(), or one with the methods open, log_metrics, log_hyperparams and close; "
                "True selects TensorBoard, False no logger"
            )
        loggers.append(candidate if isinstance(candidate, Logger) else Adapted(candidate))
    return loggers


def choose_callbacks(callbacks: Any, defaults: Mapping[str, Mapping[str, Any]]) -> list[Callback]:
    """Return the user's callbacks, and default callbacks of kinds that the user has not passed; checkpoints are last.

    Args:
        callbacks: a callback, a name, or a list of them.
        defaults: options of the default callbacks, by name.

    Raises:
        ValueError: an object is not a callback, or has a method with an unknown hook name.
        LookupError: no callback has this name.
    """
    named = [] if callbacks is None else listed(callbacks)
    chosen = [plugins.build("callbacks", item) if isinstance(item, str) else adapt_callback(item) for item in named]
    for callback in chosen:
        if not isinstance(callback, Callback):
            remedy = ": derive its class from fabricx.Callback"
            if isinstance(callback, type):
                remedy = ": pass an object of the class"
            elif isinstance(adapt_logger(callback), (Logger, FourMethods)):
                remedy = ": pass it as logger=..."
            raise ValueError(f"callbacks contains {_described(callback)}, which is not a fabricx.Callback{remedy}")
        check_hooks(callback)
        vars(callback).setdefault("_constructed", repr(described(callback)))
    for name, options in defaults.items():
        default = plugins.build("callbacks", name, **options)
        roles = {callback.trainer_role for callback in chosen} - {None}
        if default.trainer_role not in roles and not any(isinstance(callback, type(default)) for callback in chosen):
            chosen.append(default)
    return checkpoints_last(chosen)


def checkpoints_last(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return callbacks with those that save checkpoints at the end, as in Lightning.

    Args:
        callbacks: in the order of the user.
    """
    return sorted(callbacks, key=lambda callback: callback.trainer_role == "checkpoint")


def listed(value: Any) -> Iterable[Any]:
    """Return the objects of an argument that accepts an object or several objects.

    Args:
        value: an object, or a list, tuple or set; also a list of a configuration, such as Hydra's.
    """
    # Hydra passes lists as omegaconf.ListConfig, which is a sequence and no list.
    return value if isinstance(value, (Sequence, Set)) and not isinstance(value, str) else [value]


def _described(value: Any) -> str:
    """Return plain data as Python writes it, and an object by its class: the text of a module has many lines."""
    return repr(value) if isinstance(value, (str, int, float, type)) else f"an object of class {type(value).__name__}"
