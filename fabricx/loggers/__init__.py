"""Loggers, which store metrics; a file for each kind."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.loggers.csv import CSVLogger as CSVLogger
    from fabricx.loggers.jsonl import JSONLogger as JSONLogger
    from fabricx.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger

_MODULES = {"CSVLogger": "csv", "JSONLogger": "jsonl", "TensorBoardLogger": "tensorboard"}

__all__ = ["CSVLogger", "JSONLogger", "TensorBoardLogger"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
