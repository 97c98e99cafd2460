"""Makes strategy, loggers and callbacks from names, flags and objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabricx import plugins
from fabricx.core.callback import Callback
from fabricx.core.hooks import check_hooks
from fabricx.core.logger import Adapted, FourMethods, Logger
from fabricx.core.strategy import Strategy
from fabricx.launch.cluster import detect


def choose_strategy(
    strategy: str | Strategy, devices: int, num_nodes: int, *, reproducible: bool = False
) -> Strategy:  # fmt: skip
    """Return the strategy of a name; "auto" is single for one rank and ddp for more.

    With `reproducible`, those two stand for the one that gives the same bits for any number of ranks.

    Raises:
        ValueError: it isn't one, or it can't run on so many ranks.
        LookupError: there is none of that name.
    """
    ranks = devices * num_nodes
    if reproducible and strategy in ("auto", "ddp", "single"):
        strategy = "reproducible"
    if strategy == "auto":
        strategy = "ddp" if several_ranks(devices, num_nodes) else "single"
    chosen = plugins.build("strategies", strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, Strategy):
        raise ValueError(f"strategy={strategy!r} is not a fabricx.Strategy")
    if reproducible and not chosen.parts:
        raise ValueError(
            "deterministic='elastic' brings a strategy of its own in the place of ddp: leave strategy at 'auto' or "
            f"'ddp', instead of {type(chosen).__name__}"
        )
    most = chosen.traits.max_ranks
    if most is not None and ranks > most:
        raise ValueError(
            f"strategy={strategy!r} runs on {most} rank, and devices={devices} asks for {ranks}; "
            "take strategy='ddp', or devices=1"
        )
    return chosen


def several_ranks(devices: int, num_nodes: int) -> bool:
    """Return whether more than one rank will train."""
    found = detect()
    return max(devices * num_nodes, found.size if found else 1) > 1


def choose_loggers(logger: Any) -> list[Logger]:
    """Return the loggers; True is TensorBoard."""
    if logger is True:
        return [plugins.build("loggers", "tensorboard")]
    if not logger:
        return []
    chosen = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    found: list[Logger] = []
    for one in chosen:
        if isinstance(one, type) or not isinstance(one, (Logger, FourMethods)):
            raise ValueError(
                f"logger={one!r} is not a logger: it needs open, log_metrics, log_hyperparams and close; True gives "
                "TensorBoard, False none"
            )
        found.append(one if isinstance(one, Logger) else Adapted(one))
    return found


def choose_callbacks(given: Any, defaults: Mapping[str, bool], *, fast: bool) -> list[Callback]:
    """Return the given callbacks, and the default ones of kinds that aren't among them."""
    named = [given] if isinstance(given, (Callback, str)) else list(given or [])
    chosen = [plugins.build("callbacks", item) if isinstance(item, str) else item for item in named]
    for callback in chosen:
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks contains {callback!r}, which is not a fabricx.Callback")
        check_hooks(callback)
    if fast:
        chosen = [c for c in chosen if not hasattr(c, "best_model_path") and not hasattr(c, "stopped_epoch")]
    for name, wanted in defaults.items():
        if wanted:
            default = plugins.build("callbacks", name)
            if not any(isinstance(callback, type(default)) for callback in chosen):
                chosen.append(default)
    return chosen
