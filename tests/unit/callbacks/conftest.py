"""A trainer without a loop: tests call the hooks of callbacks directly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabricx import checkpoint
from fabricx.core.callback import Callback
from fabricx.core.precision import Precision
from fabricx.core.state import RunState
from fabricx.core.strategy import Strategy
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.session.saving import weights_as_state_dict
from fabricx.session.status import BatchStatus, CheckpointStatus, FailureLog, StopStatus
from fabricx.strategies import Single


def names(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in a folder."""
    return sorted(path.name for path in checkpoint.list_committed(folder))


def number(score: torch.Tensor | None) -> float:
    """Return a score that is known."""
    assert score is not None
    return float(score)


class FakeWorld:
    """World of a rank in which all ranks broadcast equal values; counts broadcasts."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.broadcasts = 0
        self.main_rank = True

    def broadcast_object(self, value: Any) -> Any:
        self.broadcasts += 1
        return value


class FakeSecond(FakeWorld):
    """World of the second of two ranks, of which the first has the values of a list, in order."""

    def __init__(self, *of_main: Any) -> None:
        super().__init__(2)
        self.of_main = list(of_main)

    def broadcast_object(self, value: Any) -> Any:
        return self.of_main.pop(0)


@dataclass
class FakeTrainer:
    run_dir: Path
    callbacks: list[Callback] = field(default_factory=list)
    num_training_batches: float = 4
    num_val_batches: list[float] = field(default_factory=lambda: [2])
    num_test_batches: list[float] = field(default_factory=lambda: [2])
    num_predict_batches: list[float] = field(default_factory=lambda: [2])
    state: RunState = field(default_factory=RunState)
    val_check_interval: Any = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 2
    accumulate_grad_batches: int = 1
    max_epochs: int = 3
    fast_dev_run: bool = False
    sanity_checking: bool = False
    interrupted: bool = False
    should_stop: bool = False
    is_global_zero: bool = True
    global_step: int = 0
    world: FakeWorld = field(default_factory=FakeWorld)
    callback_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    progress_bar_metrics: dict[str, float] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    lr_schedulers: list[Any] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    stop_reasons: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stop: StopStatus = field(default_factory=StopStatus)
    strategy: Strategy = field(default_factory=Single)
    precision: Any = field(default_factory=lambda: Precision("32-true"))

    @property
    def session(self) -> Any:
        loggers = LoggerDispatcher(self.loggers if self.is_global_zero else (), self.run_dir)
        return SimpleNamespace(
            metrics=SimpleNamespace(loggers=loggers), module=self.module, failures=FailureLog(self.failures),
            checkpoints=CheckpointStatus(), batch=BatchStatus(), stop=self.stop, precision=self.precision,
            warn_once=lambda _, text: warnings.warn(text, stacklevel=2),
        )  # fmt: skip

    module: Any = field(default_factory=lambda: torch.nn.Linear(4, 2))

    @property
    def current_epoch(self) -> int:
        return self.state.epoch

    def __post_init__(self) -> None:
        self.default_root_dir = str(self.run_dir)
        self.world.main_rank = self.is_global_zero
        self.module.single_file_checkpoints = False

    def print(self, *args: Any) -> None:
        self.printed.append(" ".join(map(str, args)))

    def request_stop(self, reason: str) -> None:
        self.stop_reasons.append(reason)

    def finish_checkpoint(self) -> bool:
        return True

    def save_checkpoint(
        self, path: str | Path, weights_only: bool = False, *, wait: bool = True, after: Any = None, failed: Any = None,
        single_file: bool | None = None,
    ) -> Path:  # fmt: skip
        state = {
            "strategy": {"module": self.module.state_dict()},
            "callbacks": {callback.state_key: callback.state_dict() for callback in self.callbacks},
        }
        with weights_as_state_dict(state):
            self.call("on_save_checkpoint", state)
        saved = checkpoint.save(Path(path), state, {"step": self.global_step, "weights_only": weights_only})
        if after is not None:
            after()
        return saved

    # as the training loop

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.module, *args)

    def start(self) -> FakeTrainer:
        self.call("setup", "fit")
        self.call("on_fit_start")
        self.call("on_train_start")
        return self

    def step(self, **metrics: float) -> None:
        self.call("on_train_batch_start", None, self.state.batch)
        self.global_step += 1
        self.state.batch += 1
        self.log(metrics)
        self.call("on_train_batch_end", None, None, self.state.batch - 1)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}

    def validate(self, **metrics: float) -> None:
        self.call("on_validation_start")
        self.log(metrics)
        self.call("on_validation_end")

    def end_epoch(self, *, complete: bool = True, **metrics: float) -> None:
        self.log(metrics)
        self.state.closing = complete
        self.call("on_train_epoch_end")
        if complete:
            self.state.epoch += 1
            self.state.batch = 0
        self.state.closing = False

    def epoch(self, steps: int = 4, validation: Mapping[str, float] | None = None, **metrics: float) -> None:
        self.call("on_train_epoch_start")
        for _ in range(steps):
            self.step()
        if validation is not None:
            self.validate(**validation)
        self.log(metrics)
        self.end_epoch()

    def end(self) -> None:
        self.call("on_train_end")
        self.call("on_fit_end")
        self.call("teardown", "fit")


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Return a function that makes a trainer with callbacks and attributes."""

    def make(*callbacks: Callback, **attributes: Any) -> FakeTrainer:
        return FakeTrainer(tmp_path, list(callbacks), **attributes)

    return make
