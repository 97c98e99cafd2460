"""Objects of Lightning in runs of fabricx: modules, data modules, callbacks and loggers, without a change of source."""

from __future__ import annotations

from fabricx.lightning.callbacks import adapt_callback
from fabricx.lightning.classes import is_lightning
from fabricx.lightning.data import adapt_data
from fabricx.lightning.loggers import adapt_logger
from fabricx.lightning.modules import adapt_module, module_class
from fabricx.lightning.strategies import adapt_strategy, known_strategy

__all__ = [
    "adapt_callback",
    "adapt_data",
    "adapt_logger",
    "adapt_module",
    "adapt_strategy",
    "is_lightning",
    "known_strategy",
    "module_class",
]
