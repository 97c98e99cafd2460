"""Validate after a duration of training: `Trainer(val_check_interval="30m")`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.callbacks.time_interval import TimeInterval
from fabricx.core.callback import Callback
from fabricx.core.options.duration import parse_duration

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class ValidationInterval(Callback):
    """Start a validation once a duration has passed since the previous validation; the Trainer adds this callback.

    With several ranks, the main rank's clock decides for all ranks, after a weight update, with about ten broadcasts
    per interval.

    Args:
        interval: duration, such as "30m", "DD:HH:MM:SS", or a `timedelta`.

    Raises:
        ValueError: the duration is invalid, or (when training starts) ranks train asynchronously.
    """

    watches_metrics: ClassVar[bool] = True  # after other hooks; checkpoints of the step contain its decision
    needs_all_ranks: ClassVar[bool] = True

    def __init__(self, interval: str | timedelta) -> None:
        self.interval = parse_duration(interval)
        self._clock = TimeInterval(self.interval)
        self._step = 0
        self._fitting = False

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.strategy.traits.lockstep and trainer.world.size > 1:
            raise ValueError(
                f"val_check_interval={self.interval}: ranks of this strategy train at their own pace, and meet for a "
                'validation after a number of updates: set a number of batches, or of updates such as "500st"'
            )
        self._start(trainer)

    def _start(self, trainer: TrainerProtocol) -> None:
        self._step = trainer.global_step
        self._clock.start(self._step)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, trainer.check_val_every_n_epoch
        if step == self._step:  # within an accumulation window
            return
        self._step = step
        if every is not None and (trainer.current_epoch + 1) % every:
            return
        if sum(trainer.num_val_batches) and self._clock.due(step, trainer.world):
            trainer.session.state.request_validation()

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._fitting and not trainer.sanity_checking:
            self._start(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self._clock.state(), "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clock.set_state(state_dict["clock"])  # a replacement checks the clock at the same steps
        self._step = state_dict["step"]
