"""A batch without a sample of this rank, which runs the collectives of the other ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from fabricx.data import Microbatch
from fabricx.loop.boundary import advance
from fabricx.loop.manual_optimization import train_without_data
from fabricx.loop.update import example_batch, skip_update, update, zero_grad
from fabricx.session.accumulation import NO_BATCH
from fabricx.session.save_points import follow_hooks

if TYPE_CHECKING:
    from fabricx.session.session import Session


def train_without_samples(session: Session, micro: Microbatch) -> int | None:
    """Run the collectives of a batch without samples.

    Args:
        session: this rank's session.
        micro: without samples of this rank.

    Returns:
        -1 if the rest of the epoch is skipped, else None.
    """
    session.batch.is_last, session.batch.index = micro.last, micro.index
    session.batch.idle_ranks = len(micro.idle)
    if micro.idle and follow_hooks(session):
        session.settings_check.check(skips=True)
        session.batch.idle_ranks = 0
        session.sharding.discard_window()
        session.batch.is_last = True
        return -1
    session.batch.in_step = True
    _compute(session, micro)
    session.batch.in_step = False
    session.window.keep(None, None)
    for hook in session.hooks.train_batch_end_empty:
        hook(None, None, micro.index)
    if micro.idle:
        follow_hooks(session)
        session.batch.idle_ranks = 0
    return None


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
        advance(session, micro)
        return
    with session.metrics.logbook.muted():  # hooks of an update log values of ranks with samples
        if micro.opens:
            zero_grad(session, micro)
        with nullcontext() if micro.closes else session.strategy.accumulate():
            session.window.sit_out(micro, NO_BATCH, session.settings_check, example_batch(micro, session.to_device))
        if micro.closes and session.window.ready():
            update(session, micro, None)
        elif micro.closes:
            skip_update(session, micro)
    if micro.closes:
        advance(session, micro)
