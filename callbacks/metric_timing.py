"""Decide when, within an epoch, callbacks that monitor a metric read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabricx.core.trainer import TrainerProtocol


def reads_at_epoch_end(trainer: TrainerProtocol, requested: bool | None) -> bool:
    """Return whether to read the metric at the end of each training epoch, rather than after each validation.

    Args:
        trainer: the trainer, for its validation schedule.
        requested: the user's choice. None decides by the schedule: the end of the training epoch if validation runs
            once at the end of every epoch, or never, because training and validation metrics are both complete then.
    """
    if requested is not None:
        return requested
    if not has_validation(trainer):
        return True
    interval = trainer.val_check_interval  # the float 1.0 means once per epoch, the int 1 after every batch
    return isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1


def has_validation(trainer: TrainerProtocol) -> bool:
    """Return whether the run has validation batches.

    Args:
        trainer: the trainer.
    """
    return sum(trainer.num_val_batches) > 0
