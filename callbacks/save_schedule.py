"""Decide when `ModelCheckpoint` saves."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from fabricx.callbacks.checkpoint_ranking import MetricAge
from fabricx.callbacks.metric_timing import has_validation
from fabricx.callbacks.time_interval import TimeInterval

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricx.core.trainer import TrainerProtocol


def trained(trainer: TrainerProtocol) -> tuple[int, int]:
    """Return the number of weight updates, and of the epochs whose last batch was trained.

    Args:
        trainer: the trainer.
    """
    state = trainer.state
    return trainer.global_step, state.epoch + (state.last or state.drained)


@final
class SaveSchedule:
    """Intervals between saves by steps, epochs and time, and the weights that were saved already.

    All ranks have the same schedule.

    Attributes:
        handled: newest step for which a save was considered.
        saved: steps and epochs of the newest checkpoint, as `trained` returns them.
        ranked: steps and epochs at the newest comparison with the best checkpoints.
        waiting: a save is due, but the monitored metric was not logged for these weights yet.
        metric: age of the monitored metric.

    Args:
        interval: time between two saves; None without saves by time.
    """

    def __init__(self, interval: timedelta | None) -> None:
        self.handled = 0
        self.saved = self.ranked = (0, 0)
        self.waiting = False
        self.metric = MetricAge()
        self._first_epoch = 0  # of this fit, at whose start nothing is logged
        self._clock = None if interval is None else TimeInterval(interval)

    def start(self, trainer: TrainerProtocol, *, resumed: bool) -> None:
        """Start the schedule of a fit.

        Args:
            trainer: the trainer, at the start of the training.
            resumed: the state was loaded from a checkpoint; a save of the same step may still be due.
        """
        if not resumed:
            self.handled = trainer.global_step
            self.saved = self.ranked = trained(trainer)
            self._first_epoch = trainer.state.epoch
            self.waiting, self.metric.validated_step = False, -1
        if self._clock is not None:
            self._clock.start(trainer.global_step)

    def step_due(self, trainer: TrainerProtocol, every_n_steps: int) -> bool:
        """Return whether a save is due after this step. Collective with an interval of time.

        Args:
            trainer: the trainer, after a weight update.
            every_n_steps: weight updates between two saves; 0 without saves by steps.
        """
        step = trainer.global_step
        due = every_n_steps > 0 and step % every_n_steps == 0
        if self._clock is not None:
            due = self._clock.due(step, trainer.world) or due
        return due

    def time_due(self, trainer: TrainerProtocol) -> bool:
        """Return whether the interval of time has passed. Collective.

        Args:
            trainer: the trainer, after an epoch or a validation.
        """
        return self._clock is not None and self._clock.due(trainer.global_step, trainer.world, ask=True)

    def epochs_trained(self, trainer: TrainerProtocol) -> bool:
        """Return whether an epoch of this fit has ended, so that metrics of training epochs exist.

        Args:
            trainer: the trainer.
        """
        return trainer.current_epoch > self._first_epoch

    def validated(self, trainer: TrainerProtocol) -> bool:
        """Return whether a validation of this fit has ended, or none will.

        Args:
            trainer: the trainer.
        """
        return self.metric.validated_step >= 0 or not has_validation(trainer)

    def is_saved(self, trainer: TrainerProtocol) -> bool:
        """Return whether nothing was trained since the newest checkpoint.

        Args:
            trainer: the trainer.
        """
        return _is_newest(trainer, self.saved)

    def is_ranked(self, trainer: TrainerProtocol) -> bool:
        """Return whether nothing was trained since the newest comparison with the best checkpoints.

        Args:
            trainer: the trainer.
        """
        return _is_newest(trainer, self.ranked)

    def metric_age(self, trainer: TrainerProtocol, monitor: str) -> tuple[bool, bool]:
        """Return whether the metric was not logged, and whether its value is missing or that of older weights.

        Collective: a metric may be logged on the main rank only.

        Args:
            trainer: the trainer.
            monitor: name of the metric.
        """
        missing = monitor not in trainer.callback_metrics and monitor not in ("step", "epoch")
        stale = missing or self.metric.stale(trainer.global_step)
        missing, stale = trainer.world.broadcast_object((missing, stale))
        return missing, stale

    def state(self) -> dict[str, Any]:
        """Return the schedule as plain data, with which a replacement saves at the same steps as the other ranks."""
        return {
            "steps": [self.handled, self.saved[0], self.ranked[0], self.metric.validated_step],
            "epochs": [self.saved[1], self.ranked[1], self._first_epoch],
            "waiting": [self.waiting, self.metric.from_validation],
            "clock": None if self._clock is None else self._clock.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule.

        Args:
            state: result of `state`, or a part of it from an earlier version.
        """
        self.handled, saved, ranked, self.metric.validated_step = state.get("steps", [0, 0, 0, -1])
        epochs = [*state.get("epochs", [0, 0]), 0]  # of two or three numbers
        self.saved, self.ranked, self._first_epoch = (saved, epochs[0]), (ranked, epochs[1]), epochs[2]
        self.waiting, self.metric.from_validation = state.get("waiting", [False, False])
        if self._clock is not None and state.get("clock") is not None:
            self._clock.set_state(state["clock"])


def _is_newest(trainer: TrainerProtocol, since: tuple[int, int]) -> bool:
    """Return whether nothing was trained since then. An epoch without updates may have changed buffers."""
    steps, epochs = trained(trainer)
    return steps == since[0] and epochs <= since[1]
