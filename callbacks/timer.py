"""A limit on how long training may take, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from fabricx.core.callback import Callback
from fabricx.duration import parse_duration

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer

STAGES = ("train", "sanity_check", "validate", "test", "predict")


@final
class Timer(Callback):
    """Stop training after a time, and measure each stage.

    The time that a resumed run had used before counts as well. With several ranks, `interval="step"` is agreed upon
    without a collective on each step, so that all ranks stop at the same one.

    Args:
        duration: "2h30m", "DD:HH:MM:SS", a `timedelta`, or a mapping of its arguments; None only measures.
        interval: stop at the end of a step or of an epoch.
        verbose: say so when time is up.
    """

    needs_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f'Timer(interval={interval!r}): it can be "step" or "epoch"')
        self.duration = None if duration is None else parse_duration(duration)
        self.interval = interval
        self.verbose = verbose
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._before: dict[str, float] = {}  # seconds in earlier attempts and earlier rounds of the stage
        self._limit = float("inf")  # on the monotonic clock
        self._stopped = False

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage began on the monotonic clock, in seconds, or None if it hasn't."""
        return self._begun.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended on the monotonic clock, in seconds, or None if it hasn't."""
        return self._ended.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return how many seconds a stage has taken so far, over all its rounds and attempts."""
        before = self._before.get(_known(stage), 0.0)
        if stage not in self._begun:
            return before
        return before + self._ended.get(stage, time.monotonic()) - self._begun[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return how many seconds are left for a stage, or None without a limit."""
        return None if self.duration is None else self.duration.total_seconds() - self.time_elapsed(stage)

    def _begin(self, stage: str) -> None:
        self._before[stage] = self.time_elapsed(stage)
        self._begun[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _end(self, stage: str) -> None:
        if stage in self._begun:
            self._ended[stage] = time.monotonic()

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("train")
        remaining = self.time_remaining()
        self._stopped = False
        self._limit = float("inf") if remaining is None else time.monotonic() + remaining
        if remaining is not None and remaining <= 0 and self._before["train"]:  # an earlier run has used it up
            self._stopped = True
            trainer.request_stop(self._tell(trainer))

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.interval == "step" and time.monotonic() >= self._limit and not self._stopped:
            self._stopped = True
            trainer.request_stop(self._tell(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        # One question per epoch: the main rank's clock decides for all.
        if self.interval == "epoch" and self.duration is not None and not self._stopped:
            self._stopped = bool(trainer.world.broadcast_object(time.monotonic() >= self._limit))
            if self._stopped:
                self._tell(trainer)
                trainer.should_stop = True

    def _tell(self, trainer: Trainer) -> str:
        text = f"the time limit of {self.duration} is reached after {trainer.global_step} steps"
        if self.verbose:
            trainer.print(text)
        return text

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._end("train")
        self._limit = float("inf")

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        self._end("sanity_check")

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._end("predict")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._begun.clear()
        self._ended.clear()
        self._before = dict(state_dict["time_elapsed"])


def _known(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"there is no stage {stage!r}; known: {', '.join(STAGES)}")
    return stage
