"""A batch without a sample of this rank, which runs the collectives of the other ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from fabricx.data import Microbatch
from fabricx.loop.batch_hooks import follow_end_hooks, follow_start_hooks
from fabricx.loop.boundary import advance, forget_skipped, skip_rest
from fabricx.loop.manual_optimization import train_without_data
from fabricx.loop.update import example_batch, skip_update, update, zero_grad
from fabricx.session.absences import NO_BATCH

if TYPE_CHECKING:
    from fabricx.session.session import Session


def train_without_samples(session: Session, micro: Microbatch) -> bool:
    """Run the collectives of a batch without samples.

    Args:
        session: this rank's session.
        micro: without samples of this rank.

    Returns:
        whether the rest of the epoch is skipped.
    """
    session.batch.is_last, session.batch.index = micro.last, micro.index
    forget_skipped(session, micro)
    if follow_start_hooks(session, micro):
        skip_rest(session)
        return True
    session.batch.in_step = True
    _compute(session, micro)
    session.batch.in_step = False
    if micro.closes:
        advance(session, micro)
    follow_end_hooks(session, micro)
    return False


def _compute(session: Session, micro: Microbatch) -> None:
    if micro.size is None:
        source = type(session.data.train_dataloader).__name__
        raise ValueError(
            f"rank {session.world.rank}: {source} ended after {micro.index} batches of this epoch, fewer than its "
            "length or limit_train_batches announced, and other ranks have already weighted their batches by that "
            "number. Remove __len__ from it, or set limit_train_batches to a number of batches that every rank has"
        )
    if not session.module.automatic_optimization:
        train_without_data(session, micro, example_batch(micro, session.to_device))
        session.fault_tolerance.after_own_update(micro)
        return
    with session.metrics.logbook.muted():  # hooks of an update log values of ranks with samples
        if micro.opens:
            zero_grad(session, micro)
        session.fault_tolerance.before_backward(micro)  # with the values of the window's earlier microbatches
        with nullcontext() if micro.closes else session.strategy.accumulate():
            session.window.sit_out(micro, NO_BATCH, session.settings_check, example_batch(micro, session.to_device))
        if micro.closes and session.window.finish_gradient():
            update(session, micro, None)
        elif micro.closes:
            skip_update(session, micro)
