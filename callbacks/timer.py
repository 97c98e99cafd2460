"""Limit the training time, and measure the duration of each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.options.duration import parse_duration

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

_REACHED = "reached the time limit"
STAGES = ("train", "sanity_check", "validate", "test", "predict")


@final
class Timer(Callback):
    """Stop training after a duration, and measure each stage.

    The training time of the run that a checkpoint resumes counts as well. With several ranks, `interval="step"` stops
    all ranks at the same step, agreed upon without a collective per step.

    Args:
        duration: limit of the training time, 0 or more: "2h30m", "DD:HH:MM:SS", a `timedelta`, or a mapping with the
            arguments of `timedelta`; None only measures.
        interval: "step" stops at the end of a step, "epoch" at the end of an epoch.
        verbose: print a message when the limit is reached.

    Raises:
        ValueError: `duration` or `interval` is invalid.
    """

    needs_all_ranks: ClassVar[bool] = True
    former_methods: ClassVar = renamed("_check_time_remaining", "a hook that sets trainer.should_stop")

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f'Timer(interval={interval!r}): must be "step" or "epoch"')
        self.duration = None if duration is None else parse_duration(duration)
        self.interval = interval
        self.verbose = verbose
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._before: dict[str, float] = {}  # seconds per stage, in earlier runs and earlier rounds of the stage
        self._limit = float("inf")  # on the monotonic clock
        self._stopped = False

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage began.

        Args:
            stage: "train", "sanity_check", "validate", "test" or "predict".

        Returns:
            seconds on the monotonic clock, or None if the stage has not begun.

        Raises:
            ValueError: an unknown stage.
        """
        return self._begun.get(_checked(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended.

        Args:
            stage: "train", "sanity_check", "validate", "test" or "predict".

        Returns:
            seconds on the monotonic clock, or None if the stage has not ended.

        Raises:
            ValueError: an unknown stage.
        """
        return self._ended.get(_checked(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the duration of a stage in seconds so far, summed over its rounds and over resumed runs.

        Args:
            stage: "train", "sanity_check", "validate", "test" or "predict".

        Raises:
            ValueError: an unknown stage.
        """
        before = self._before.get(_checked(stage), 0.0)
        if stage not in self._begun:
            return before
        return before + self._ended.get(stage, time.monotonic()) - self._begun[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds until `duration`, or None without a limit.

        Args:
            stage: "train", "sanity_check", "validate", "test" or "predict".

        Raises:
            ValueError: an unknown stage.
        """
        return None if self.duration is None else self.duration.total_seconds() - self.time_elapsed(stage)

    def _begin(self, stage: str) -> None:
        self._before[stage] = self.time_elapsed(stage)
        self._begun[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _start_limit(self) -> None:
        """Set the end of the training; a request to stop before is forgotten, since it may be lost with a rank."""
        remaining = self.time_remaining()
        self._stopped = False
        self._limit = float("inf") if remaining is None else time.monotonic() + remaining

    def _end(self, stage: str) -> None:
        if stage in self._begun:
            self._ended[stage] = time.monotonic()

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin("train")
        self._start_limit()
        remaining = self.time_remaining()
        if remaining is not None and remaining <= 0:  # a duration of 0, or the resumed run used it up
            self._stopped = True
            trainer.request_stop(self._announce(trainer))

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.interval == "step" and time.monotonic() >= self._limit and not self._stopped:
            self._stopped = True
            trainer.request_stop(self._announce(trainer))

    def on_train_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        # A single broadcast per epoch: the main rank's clock decides for all ranks, also if that of this rank has
        # requested the stop at the start.
        if self.interval == "epoch" and self.duration is not None:
            stops = bool(trainer.world.broadcast_object(self._stopped or time.monotonic() >= self._limit))
            if stops and not self._stopped:
                self._stopped = True
                self._announce(trainer)
                trainer.should_stop = True

    def _announce(self, trainer: TrainerProtocol) -> str:
        text = f"{_REACHED} of {self.duration} after {trainer.global_step} steps"
        if self.verbose:
            trainer.print(text)
        return text

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end("train")
        self._limit = float("inf")
        if not self._stopped and trainer.session.stop.reason.startswith(_REACHED):  # by the clock of another rank
            self._announce(trainer)

    def on_sanity_check_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end("sanity_check")

    def on_validation_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._begin("validate")

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin("test")

    def on_test_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end("test")

    def on_predict_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end("predict")

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        for stage in self._begun.keys() - self._ended.keys():
            self._end(stage)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        running = self._begun.keys() - self._ended.keys()  # not empty: other ranks have died, and training continues
        own = {stage: self.time_elapsed(stage) for stage in running}
        self._ended.clear()
        self._before = dict(state_dict["time_elapsed"])
        self._before.update({stage: max(self._before.get(stage, 0.0), own[stage]) for stage in running})
        self._begun = dict.fromkeys(running, time.monotonic())
        if "train" in running:
            self._start_limit()


def _checked(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"there is no stage {stage!r}; stages: {', '.join(STAGES)}")
    return stage
