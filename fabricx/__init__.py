"""fabricx: training for PyTorch in which the way it is distributed is one word."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.app import main
    from fabricx.callback import Callback
    from fabricx.datamodule import DataModule
    from fabricx.logger import Logger
    from fabricx.module import Module
    from fabricx.seed import seed_everything
    from fabricx.strategy import Strategy
    from fabricx.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Callback", "DataModule", "Logger", "Module", "Strategy", "Trainer", "main", "seed_everything"]

_HOME = {
    "Callback": "fabricx.callback",
    "DataModule": "fabricx.datamodule",
    "Logger": "fabricx.logger",
    "Module": "fabricx.module",
    "Strategy": "fabricx.strategy",
    "Trainer": "fabricx.trainer",
    "main": "fabricx.app",
    "seed_everything": "fabricx.seed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fabricx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
