"""The batches of an epoch on ranks in lockstep: each update has a part of every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fabricx.loop.batch import Synchronization, train_batch
from fabricx.loop.boundary import advance, end_batch, skip_rest
from fabricx.loop.no_samples import train_without_samples
from fabricx.loop.update import skip_update, update
from fabricx.session.schedule import check_any_batch
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.session.session import Session

LOCKSTEP: Final = Synchronization(skip_rest, update, skip_update, advance)


def train_batches(session: Session) -> bool:
    """Train the rest of the epoch's batches.

    Args:
        session: this rank's session.

    Returns:
        whether the epoch is complete.
    """
    state, accumulate = session.state, session.options.accumulate_grad_batches
    session.set_buffer_source()
    for micro in session.data.train_feed.epoch(
        state.epoch, accumulate=accumulate, position=state.samples, first=state.batch
    ):
        session.recorder.lap(Span.DATA)
        session.window.begin(micro)
        if train_without_samples(session, micro) if micro.empty else train_batch(session, micro, LOCKSTEP):
            return True  # the rest of the epoch is skipped
        if end_batch(session, micro):
            return micro.last
    check_any_batch(session)
    session.state.last = True  # also of an epoch with fewer batches than its length
    return True
