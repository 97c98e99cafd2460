"""fabricx: training for PyTorch, distributed by a single setting."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx import pytorch as pytorch
    from fabricx.cli.hydra_app import main
    from fabricx.core.callback import Callback
    from fabricx.core.datamodule import DataModule
    from fabricx.core.datamodule import DataModule as LightningDataModule
    from fabricx.core.logger import Logger
    from fabricx.core.module import LightningModule as LightningModule
    from fabricx.core.module import Module
    from fabricx.core.module_state.rng import seed_everything
    from fabricx.core.strategy import Strategy, Traits
    from fabricx.data.combined import CombinedLoader
    from fabricx.distributed.compression.codecs import Codec
    from fabricx.trainer.trainer import Trainer
    from fabricx.trainer.tuner import Tuner

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Codec",
    "CombinedLoader",
    "DataModule",
    "LightningDataModule",
    "LightningModule",
    "Logger",
    "Module",
    "Strategy",
    "Trainer",
    "Traits",
    "Tuner",
    "main",
    "seed_everything",
]

_MODULES = {
    "Callback": "fabricx.core.callback",
    "Codec": "fabricx.distributed.compression.codecs",
    "CombinedLoader": "fabricx.data.combined",
    "DataModule": "fabricx.core.datamodule",
    "LightningCLI": "fabricx.cli.lightning.app",
    "LightningDataModule": "fabricx.core.datamodule:DataModule",
    "LightningModule": "fabricx.core.module",
    "Logger": "fabricx.core.logger",
    "Module": "fabricx.core.module",
    "Strategy": "fabricx.core.strategy",
    "Trainer": "fabricx.trainer.trainer",
    "Traits": "fabricx.core.strategy",
    "Tuner": "fabricx.trainer.tuner",
    "main": "fabricx.cli.hydra_app",
    "seed_everything": "fabricx.core.module_state.rng",
}

_PACKAGES = ("callbacks", "launchers", "loggers", "pytorch", "strategies")  # imported at first access


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fabricx.{name}")
    if name == "Fabric":  # its use is an error that names the successor
        return importlib.import_module("fabricx.pytorch").Fabric
    if name not in _MODULES:
        raise AttributeError(f"module 'fabricx' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
