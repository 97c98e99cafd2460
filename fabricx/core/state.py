"""The position of a run: the only record that checkpoints keep and other modules read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any


class Phase(StrEnum):
    """What the trainer is doing at this moment."""

    IDLE = "idle"
    SANITY = "sanity"
    TRAIN = "train"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"


class Stage(IntEnum):
    """What comes next on this rank, in the order of an epoch; those that are begun are begun again after a fault."""

    BATCH_TOLD = 0  # whoever is told last of a batch is being told
    BETWEEN = 1
    EPOCH_ENDS = 2  # the end of an epoch is being made known
    EPOCH_TOLD = 3  # whoever is told last of an epoch is being told
    EPOCH_OVER = 4


@dataclass
class RunState:
    """The position of a run.

    Attributes:
        phase: what is going on; saved, never inferred from the counters.
        epoch: epochs completed.
        batch: batches of the current epoch that this rank has finished.
        shared_by: ranks among which the batches that `batch` counts were divided.
        accumulate: microbatches of their windows.
        together: samples of one on all ranks that the run began with; 0 where that isn't known.
        step: weight updates of the model, however many optimizers there are.
        samples: position in the data: samples of the current epoch's global order that have been trained.
        ranks: how many the run began with; the global batch is theirs, whoever trains it now.
        seed: what the data order and the ranks' random streams are drawn from.
        attempt: how often the run was taken up again.
        drained: all batches of the epoch are trained.
        closing: the epoch's batches and hooks are done, its schedules are not.
        passed: global batches whose place in the data is behind, since the run began; not counted where ranks go at
            their own pace, or the module optimises manually.
        trained: global batches whose update is in the weights, or that gave no loss; so much as `passed`, unless some
            were lost or trained twice.
        left_out: samples of the global order that lie between two windows that were trained one after the other.
        again: samples of the global order in windows that begin before the end of the one before.
        validating: a validation of these weights is due, or has begun, and isn't done.
        judging: it is done, and callbacks that watch metrics have not seen it yet.
    """

    phase: Phase = Phase.IDLE
    epoch: int = 0
    batch: int = 0
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
    validating: bool = False
    judging: bool = False
    passed: int = 0
    trained: int = 0
    left_out: int = 0
    again: int = 0

    def jump(self, start: int) -> None:
        """Count the samples between the end of the window before and a window that begins elsewhere."""
        self.left_out += max(0, start - self.samples)
        self.again += max(0, self.samples - start)

    def state_dict(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {**dataclasses.asdict(self), "phase": str(self.phase)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a record made by `state_dict`; unknown keys are ignored, so that older readers cope."""
        for field in dataclasses.fields(self):
            if field.name in state:
                setattr(self, field.name, state[field.name])
        self.phase = Phase(self.phase)
