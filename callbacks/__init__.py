"""Callbacks: training features that need only the hooks of a run; each callback has a file."""

from __future__ import annotations

if __name__ != "fabricx.callbacks":
    raise ImportError(f"import this package as fabricx.callbacks, not {__name__}")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from fabricx.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from fabricx.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from fabricx.callbacks.ema import EMA as EMA
    from fabricx.callbacks.fault_recovery import FaultRecovery as FaultRecovery
    from fabricx.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from fabricx.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from fabricx.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from fabricx.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulationScheduler
    from fabricx.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from fabricx.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from fabricx.callbacks.load_balancer import LoadBalancer as LoadBalancer
    from fabricx.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from fabricx.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from fabricx.callbacks.model_summary import ModelSummary as ModelSummary
    from fabricx.callbacks.model_summary import RichModelSummary as RichModelSummary
    from fabricx.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from fabricx.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from fabricx.callbacks.profiler import Profiler as Profiler
    from fabricx.callbacks.progress_bar import ProgressBar as ProgressBar
    from fabricx.callbacks.progress_bar import RichProgressBar as RichProgressBar
    from fabricx.callbacks.progress_bar import TQDMProgressBar as TQDMProgressBar
    from fabricx.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from fabricx.callbacks.timer import Timer as Timer
    from fabricx.callbacks.tracing import Tracing as Tracing
    from fabricx.callbacks.validation_interval import ValidationInterval as ValidationInterval
    from fabricx.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from fabricx.callbacks.weight_averaging import WeightAveraging as WeightAveraging

# Callbacks are imported on first access, so that a run imports only the callbacks that it uses.
_MODULES = {
    "EMA": "ema",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "FaultRecovery": "fault_recovery",
    "GradientAccumulation": "gradient_accumulation",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "LoadBalancer": "load_balancer",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "Profiler": "profiler",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "progress_bar",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "TQDMProgressBar": "progress_bar",
    "Timer": "timer",
    "Tracing": "tracing",
    "ValidationInterval": "validation_interval",
    "WeightAveraging": "weight_averaging",
}

# Names of Lightning that fabricx has not, with the alternative.
_ABSENT = {
    "ModelPruning": "call torch.nn.utils.prune in a Callback of your own, or in a hook of the module",
    "SpikeDetection": "EarlyStopping(check_finite=True, divergence_threshold=...) stops at diverging values",
    "ThroughputMonitor": 'each run records samples per second (see "fabricx report"); Profiler prints a table',
}

__all__ = [
    "EMA",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "FaultRecovery",
    "GradientAccumulation",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "LoadBalancer",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "Profiler",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Timer",
    "Tracing",
    "ValidationInterval",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ImportError(f"fabricx has no callback {name}: {_ABSENT[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
