"""When, in an epoch, the callbacks that watch a metric look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def looks_at_epoch_end(trainer: Trainer, chosen: bool | None) -> bool:
    """Return whether a metric is looked at when a training epoch ends, rather than whenever validation ends.

    Args:
        trainer: whose validation schedule it is.
        chosen: what the user asked for; None leaves it to the schedule. Where validation runs once in every epoch, at
            its end, or not at all, the end of the training epoch is right: metrics of both are known then.
    """
    if chosen is not None:
        return chosen
    if not has_validation(trainer):
        return True
    interval = trainer.val_check_interval  # 1.0 is once an epoch, 1 is after every batch
    return isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1


def has_validation(trainer: Trainer) -> bool:
    """Return whether there are validation batches to run."""
    return sum(trainer.num_val_batches) > 0
