"""Contract of every callback of fabricx; a test fails if a new callback is missing in CALLBACKS."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import fabricx.callbacks as package
from fabricx import checkpoint
from fabricx.callbacks import (
    EMA,
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    FaultRecovery,
    GradientAccumulation,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    LoadBalancer,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    Profiler,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    Tracing,
    ValidationInterval,
    WeightAveraging,
)
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import check_hooks

CALLBACKS: dict[str, Callable[[], Callback]] = {
    "BackboneFinetuning": BackboneFinetuning,
    "BaseFinetuning": BaseFinetuning,
    "BasePredictionWriter": BasePredictionWriter,
    "BatchSizeFinder": BatchSizeFinder,
    "DeviceStatsMonitor": DeviceStatsMonitor,
    "EMA": EMA,
    "EMAWeightAveraging": EMAWeightAveraging,
    "EarlyStopping": lambda: EarlyStopping("val_loss"),
    "FaultRecovery": FaultRecovery,
    "LoadBalancer": LoadBalancer,
    "GradientAccumulation": lambda: GradientAccumulation({2: 4}),
    "LambdaCallback": LambdaCallback,
    "LearningRateFinder": LearningRateFinder,
    "LearningRateMonitor": LearningRateMonitor,
    "ModelCheckpoint": lambda: ModelCheckpoint(monitor="val_loss", save_last=True, train_time_interval="10m"),
    "ModelSummary": ModelSummary,
    "OnExceptionCheckpoint": lambda: OnExceptionCheckpoint("folder"),
    "Profiler": Profiler,
    "ProgressBar": ProgressBar,
    "RichModelSummary": RichModelSummary,
    "RichProgressBar": RichProgressBar,
    "TQDMProgressBar": TQDMProgressBar,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1),
    "Timer": lambda: Timer("1h"),
    "Tracing": lambda: Tracing(operators=[2, 3]),
    "ValidationInterval": lambda: ValidationInterval("30m"),
    "WeightAveraging": WeightAveraging,
}

every = pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)


def test_the_list_is_complete() -> None:
    classes = {getattr(package, name).__name__ for name in package.__all__}
    assert classes == set(CALLBACKS)


@every
def test_a_callback_can_be_sent_to_a_worker_before_a_run(make: Callable[[], Callback]) -> None:
    callback = make()
    again = pickle.loads(pickle.dumps(callback))
    assert again.state_key == callback.state_key
    assert again.state_dict().keys() == callback.state_dict().keys()


@every
def test_the_state_of_a_callback_is_restored_from_a_checkpoint(make: Callable[[], Callback], tmp_path: Path) -> None:
    state = make().state_dict()
    checkpoint.save(tmp_path / "a", {"callback": state}, {})  # refuses objects that aren't plain data
    again = make()
    again.load_state_dict(checkpoint.load(tmp_path / "a")["callback"])
    assert again.state_dict().keys() == state.keys()
    for name, value in state.items():
        assert again.state_dict()[name] == value, name


@every
def test_each_hook_of_the_contract_is_called(make: Callable[[], Callback]) -> None:
    check_hooks(make())


@every
def test_a_callback_does_nothing_outside_of_a_run(
    make: Callable[[], Callback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = make()
    callback.state_dict()
    del callback
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@every
def test_a_callback_has_a_docstring(make: Callable[[], Callback]) -> None:
    assert type(make()).__doc__


def test_only_metric_callbacks_run_last() -> None:
    last = {name for name, make in CALLBACKS.items() if make().watches_metrics}
    assert last == {"EarlyStopping", "FaultRecovery", "LoadBalancer", "ModelCheckpoint", "ValidationInterval"}


def test_absent_names_of_lightning_name_the_alternative() -> None:
    with pytest.raises(ImportError, match="EarlyStopping"):
        from fabricx.callbacks import SpikeDetection  # noqa: F401
