"""The start and the end of an epoch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fabricx.checkpoint.content import recount_batches, report_global_batch
from fabricx.consistency.hook_effects import compare_ranks, local_hyperparameters
from fabricx.core.hooks import call
from fabricx.core.manual_optimization import check_options
from fabricx.core.rng import random_kept
from fabricx.core.schedule import agree_at_boundary, epoch_pending, limit_reached
from fabricx.core.state import Stage
from fabricx.loop.boundary import call_last_hooks
from fabricx.loop.evaluation import validate_in_fit
from fabricx.metrics.publish import log_measured, publish_epoch

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def begin_epoch(trainer: Trainer) -> bool | None:
    """Prepare an epoch, or the rest of it.

    Returns:
        None if its batches are to be trained; else whether the epoch is complete.
    """
    trainer.fault_tolerance.begin_epoch()
    trainer.begin_epoch()
    rates = local_hyperparameters(trainer)
    with repeated_hooks(trainer.state.batch):
        call(trainer.hooks.on_train_epoch_start)
    if not trainer.module.automatic_optimization:
        check_options(trainer)  # a callback may have changed the accumulation
    recount_batches(trainer)
    report_global_batch(trainer)
    compare_ranks(trainer, f"at the start of epoch {trainer.state.epoch}", rates)
    if trainer.fault_tolerance.stage is Stage.BATCH_TOLD:  # the last hooks of a batch were interrupted
        call_last_hooks(trainer, trainer.state.batch - 1)
    if trainer.state.validating or trainer.state.judging:  # after a batch that an earlier run has trained
        validate_in_fit(trainer)
        if agree_at_boundary(trainer) or limit_reached(trainer):
            return epoch_pending(trainer)
    trainer.fault_tolerance.begin_batches(saved_within=_saved_within_batches(trainer))
    trainer.window.accumulate = trainer.accumulate_grad_batches
    return None


def end_epoch(trainer: Trainer) -> None:
    """Validate, if that is due after the last batch, and publish the values of the epoch."""
    if trainer.state.validating or trainer.state.judging:
        validate_in_fit(trainer)
    trainer.fault_tolerance.before_publishing()
    publish_epoch(trainer)
    log_measured(trainer)
    call(trainer.hooks.train_epoch_end_others)
    trainer.fault_tolerance.after_publishing()
    publish_epoch(trainer)  # values that the hooks have logged


def repeated_hooks(repeated: int) -> AbstractContextManager[None]:
    """Return a context for hooks that run once more than in a run without interruption: random states are kept."""
    return random_kept() if repeated else nullcontext()


def _saved_within_batches(trainer: Trainer) -> bool:
    """Return whether a checkpoint may be written between the start and the end of a global batch."""
    if trainer.accumulate_grad_batches > 1 or trainer.state.ranks > trainer.world.size or trainer.strategy.parts:
        return True
    return bool(trainer.hooks.on_train_batch_start)  # this hook may save after the data is read
