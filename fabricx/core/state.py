"""The position of a run, as a record that checkpoints save and other modules read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Any, Final


class Phase(StrEnum):
    """Present activity of the trainer."""

    IDLE = "idle"
    SANITY = "sanity"
    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"


# str() of the enumerations of Lightning is the name of the member, as in Lightning; they equal their value.
class TrainerFn(str, Enum):  # noqa: UP042
    """Newest call of the Trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(str, Enum):  # noqa: UP042
    """Progress of the newest call of the Trainer."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Return whether the call has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class RunningStage(str, Enum):  # noqa: UP042
    """Present activity of the Trainer, as Lightning names it."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Return whether a validation, also before training, or a test is running."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """Return the first word of the names of the loaders."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


_STAGES: Final = {Phase.SANITY: RunningStage.SANITY_CHECKING}
_FIRST_STAGES: Final[Mapping[TrainerFn | None, RunningStage]] = {
    TrainerFn.FITTING: RunningStage.TRAINING, TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING, TrainerFn.PREDICTING: RunningStage.PREDICTING,
}  # fmt: skip
_OF_CALL: Final = ("fn", "status", "cut_short", "failing")  # fields that a checkpoint does not contain


class EpochStep(IntEnum):
    """What comes next in an epoch, in its order; hooks that were interrupted by a fault are called again."""

    BATCH_WATCHERS = 0  # `on_train_batch_end` of callbacks that watch metrics
    BETWEEN = 1
    EPOCH_ENDS = 2  # `on_train_epoch_end` of the other callbacks and the module
    EPOCH_WATCHERS = 3  # `on_train_epoch_end` of callbacks that watch metrics
    EPOCH_OVER = 4


@dataclass
class RunState:
    """The position of a run.

    Attributes:
        phase: present activity; saved, never inferred from the counters.
        epoch: completed epochs.
        batch: batches of the current epoch that this rank has finished.
        before: batches of earlier epochs that this rank has finished; in lockstep, in units of the ranks at the start.
        shared_by: number of ranks among which the batches in `batch` were divided.
        accumulate: microbatches per accumulation window of these batches.
        together: samples of a batch on all ranks at the start of the run; 0 if unknown.
        step: weight updates of the model, for any number of optimizers.
        samples: position in the data: samples of the current epoch's global order that have been trained.
        ranks: number of ranks at the start of the run, which determines the global batch.
        seed: seed of the data order and of the ranks' random streams.
        attempt: number of restarts and resumes of the run.
        drained: all batches of the epoch are trained, or the rest is skipped.
        closing: the values of the epoch are published, and its hooks have run, but for callbacks that watch metrics;
            its schedules have not advanced.
        ended_early: the epoch has ended before its last batch; callbacks that watch metrics may not have processed it.
        last: the newest batch is the last of its epoch, whose length may be unknown.
        passed: global batches since the start of the run whose position in the data has been passed; not counted if
            ranks work at their own pace, or with manual optimization.
        trained: global batches whose update is in the weights, or that had no loss; equal to `passed` unless batches
            were lost or trained twice.
        left_out: samples of the global order that were skipped between two consecutive windows.
        again: samples of the global order in windows that begin before the end of the previous window.
        uncounted: ranks read data of their own, and their number has changed within an epoch, so that samples can't be
            counted.
        validating: a validation of the present weights is due or has begun, and is not complete.
        evaluated: validation batches of the run, for the values of single batches in the loggers.
        buffer_source: first data rank with a sample of the newest batch; see `Strategy`.
        plateau_step: newest update after which schedules with interval "step" that read a metric have advanced.
        validated: a validation follows or has followed the newest batch.
        judging: the validation is complete, but callbacks that watch metrics have not processed it.
        run: random name of the run, which restarts and resumes keep.
        cut_short: the hooks of the epoch's end have run, and not all of its batches are trained.
        fn: newest call of the Trainer.
        status: status of this call.
        failing: hooks process an error of this call.
    """

    phase: Phase = Phase.IDLE
    epoch: int = 0
    batch: int = 0
    before: int = 0
    shared_by: int = 0
    accumulate: int = 0
    together: int = 0
    step: int = 0
    samples: int = 0
    ranks: int = 0
    seed: int = 0
    attempt: int = 0
    drained: bool = False
    closing: bool = False
    ended_early: bool = False
    last: bool = False
    validating: bool = False
    validated: bool = False
    judging: bool = False
    evaluated: int = 0
    plateau_step: int = 0
    buffer_source: int = 0
    passed: int = 0
    trained: int = 0
    left_out: int = 0
    again: int = 0
    uncounted: bool = False
    run: str = ""
    cut_short: bool = False
    fn: TrainerFn | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    failing: bool = False

    @property
    def stage(self) -> RunningStage | None:
        """Return the present activity, which a run has from its set-up on; None outside of a run."""
        if self.phase is Phase.IDLE:
            runs = self.fn is not None and (self.failing or self.status is TrainerStatus.RUNNING)
            return _FIRST_STAGES[self.fn] if runs else None
        return _STAGES.get(self.phase) or RunningStage(self.phase.value)

    @property
    def ended_epochs(self) -> int:
        """Return the number of epochs that have ended, also before their last batch."""
        return self.epoch + self.cut_short

    @property
    def finished(self) -> bool:
        """Return whether the newest call has ended without an error."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Return whether the newest call has ended."""
        return self.status.stopped

    def advance(self, batch: int, start: int | None, samples: int) -> None:
        """Set the position in the data after a global batch; count skipped and repeated samples.

        Args:
            batch: batches of the epoch that this rank has finished.
            start: first sample of the accumulation window in the global order; None if unknown.
            samples: end of the window in the global order.
        """
        if start is not None and start != self.samples:
            self.left_out += max(0, start - self.samples)
            self.again += max(0, self.samples - start)
        self.batch, self.samples = batch, samples
        self.passed += 1

    def request_validation(self) -> None:
        """Request a validation of the present weights, at the end of the batch; every rank calls it after the batch."""
        self.validating = self.validated = True

    def next_epoch(self, batches: int) -> None:
        """Set the position to the first batch of the next epoch.

        Args:
            batches: trained batches of the epoch that ends; see `before`.
        """
        self.epoch += 1
        self.before += batches
        self.batch = self.samples = 0
        self.drained = self.closing = self.last = self.validated = False

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        saved = {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_CALL}
        return {**saved, "phase": str(self.phase)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a record; unknown keys are ignored, so that older versions can read newer records.

        Args:
            state: result of `state_dict`.
        """
        for field in dataclasses.fields(self):
            if field.name in state and field.name not in _OF_CALL:
                setattr(self, field.name, state[field.name])
        self.phase = Phase(self.phase)
