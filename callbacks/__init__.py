"""Callbacks: training features that need only the hooks of a run; each callback has a file."""

from __future__ import annotations

if __name__ != "fabricx.callbacks":
    raise ImportError(f"import this package as fabricx.callbacks, not {__name__}")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from fabricx.callbacks.ema import EMA as EMA
    from fabricx.callbacks.fault_recovery import FaultRecovery as FaultRecovery
    from fabricx.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from fabricx.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulationScheduler
    from fabricx.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from fabricx.callbacks.load_balancer import LoadBalancer as LoadBalancer
    from fabricx.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from fabricx.callbacks.model_summary import ModelSummary as ModelSummary
    from fabricx.callbacks.profiler import Profiler as Profiler
    from fabricx.callbacks.progress_bar import ProgressBar as ProgressBar
    from fabricx.callbacks.timer import Timer as Timer
    from fabricx.callbacks.tracing import Tracing as Tracing

# Callbacks are imported on first access, so that a run imports only the callbacks that it uses.
_MODULES = {
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "FaultRecovery": "fault_recovery",
    "GradientAccumulation": "gradient_accumulation",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "LearningRateMonitor": "learning_rate_monitor",
    "LoadBalancer": "load_balancer",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "Profiler": "profiler",
    "ProgressBar": "progress_bar",
    "Timer": "timer",
    "Tracing": "tracing",
}

__all__ = [
    "EMA",
    "EarlyStopping",
    "FaultRecovery",
    "GradientAccumulation",
    "GradientAccumulationScheduler",
    "LearningRateMonitor",
    "LoadBalancer",
    "ModelCheckpoint",
    "ModelSummary",
    "Profiler",
    "ProgressBar",
    "Timer",
    "Tracing",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
