"""Loggers, which store metrics; a file for each kind."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.loggers.comet import CometLogger as CometLogger
    from fabricx.loggers.csv import CSVLogger as CSVLogger
    from fabricx.loggers.jsonl import JSONLogger as JSONLogger
    from fabricx.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from fabricx.loggers.neptune import NeptuneLogger as NeptuneLogger
    from fabricx.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from fabricx.loggers.wandb import WandbLogger as WandbLogger

_MODULES = {
    "CSVLogger": "csv",
    "CometLogger": "comet",
    "JSONLogger": "jsonl",
    "MLFlowLogger": "mlflow",
    "NeptuneLogger": "neptune",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}

__all__ = [
    "CSVLogger",
    "CometLogger",
    "JSONLogger",
    "MLFlowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "WandbLogger",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
