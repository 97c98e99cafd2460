"""The batches of an epoch on asynchronous ranks: servers deal leases, and all ranks meet between sections."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from fabricx.data import Microbatch
from fabricx.distributed import collective_guard
from fabricx.loop.batch import Synchronization, train_batch
from fabricx.loop.boundary import advance, end_batch
from fabricx.loop.lr_schedules import follow_schedules
from fabricx.loop.update import update
from fabricx.session.rank_state import LoggedMark
from fabricx.session.schedule import check_any_batch, count_without_update, next_section
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.session.session import Session


def train_batches(session: Session) -> bool:
    """Train the rest of the epoch's batches, at the pace of this rank.

    Args:
        session: this rank's session.

    Returns:
        whether the epoch is complete.
    """
    for micro in _batches(session):
        session.recorder.lap(Span.DATA)
        session.window.begin(micro)
        if not micro.synchronises:
            with collective_guard.ASYNCHRONOUS:
                _train_leased(session, micro)
            _end_lease(session, micro)
            continue
        _meet(session, micro)
        if end_batch(session, micro):
            return micro.last
    check_any_batch(session)
    session.state.last = True  # also of an epoch with fewer batches than its length
    return True


def _batches(session: Session) -> Iterator[Microbatch]:
    """Yield the batches that this rank is dealt in the rest of the epoch, and the points at which all ranks meet."""
    state, meeting = session.state, session.fault_tolerance.meeting
    if meeting is not None:  # it began in an earlier generation of the group
        yield meeting
    yield from session.data.train_feed.leased(
        session.dealer, functools.partial(next_section, session), state.epoch,
        accumulate=session.options.accumulate_grad_batches, position=state.samples, first=state.batch,
    )  # fmt: skip


def _train_leased(session: Session, micro: Microbatch) -> None:
    """Train a batch of a lease."""
    if micro.opens:
        _begin_lease(session)
    if micro.end is not None:
        session.dealer.trains(session.state.epoch, micro.begin, micro.end)
    session.batch.asynchronous = True
    train_batch(session, micro, ASYNCHRONOUS)


def _begin_lease(session: Session) -> None:
    """Begin an accumulation window with the newest weights and their hyperparameters."""
    dealer = session.dealer
    dealer.begin_lease(session.metrics.logbook.metrics.take_sums)
    session.window.joined = dealer.leases_per_update > 1
    _reach(session, dealer.next_update())
    _take_back(session)  # a round ends if the next lease needs a separate round
    if dealer.may_drop and dealer.begins_update:
        session.window.mark = LoggedMark(session.module, session.metrics, session.recorder)
        dealer.mark()


def _take_back(session: Session) -> None:
    """Restore logged values and buffers after a dropped gradient: its batches are trained again."""
    if session.window.mark is not None and session.dealer.dropped:
        session.window.mark.restore()
        session.dealer.take_back()
        session.window.mark = None


def _refuse_to_skip(session: Session) -> None:
    raise ValueError(
        "on_train_batch_start returned -1, which skips the rest of an epoch on all ranks; here each rank works "
        "at its own pace: set trainer.should_stop, or limit_train_batches"
    )


def _update_in_turn(session: Session, micro: Microbatch, batch: Any) -> None:
    """Reserve the number of the next update, set its hyperparameters, and make it: other ranks update in between."""
    if session.window.joined:
        session.dealer.lease.share *= session.window.share
    scheduled = any(schedule.interval == "step" for schedule in session.lr_schedulers)
    _reach(session, session.dealer.take_turn(ordered=scheduled))
    update(session, micro, batch)


def _return_lease(session: Session, micro: Microbatch) -> None:
    """Count a complete lease without a gradient."""
    session.state.step = session.strategy.after_update(session.state.step)
    count_without_update(session)


def _keep_position(session: Session, micro: Microbatch) -> None:
    """The position in the data is set when all ranks meet."""


ASYNCHRONOUS: Final = Synchronization(_refuse_to_skip, _update_in_turn, _return_lease, _keep_position)


def _end_lease(session: Session, micro: Microbatch) -> None:
    """Log a step of this rank alone, and end its section early if all ranks are asked to meet."""
    if micro.closes:
        _take_back(session)
        session.metrics.log_step_alone(session.recorder, session.optimizers)
        session.recorder.end_step(session.state.step)
        asked = session.stop_requests.reason is not None
        if asked or session.fault_tolerance.outdated:
            session.dealer.close_section()
    session.checkpoints.poll()


def _meet(session: Session, micro: Microbatch) -> None:
    """Synchronise all ranks after the last lease of a section."""
    _take_back(session)
    ft, strategy = session.fault_tolerance, session.strategy
    ft.meeting, session.dealer.within_section = micro, False
    ft.check_members()
    strategy.synchronize()
    _reach(session, strategy.after_update(session.state.step))
    if session.overridden.optimizer_step and session.world.size > 1:
        session.dealer.join_hyperparameters()
    session.metrics.training.metrics.share(session.dealer.logged())  # with the position, for a rank that joins later
    ft.meeting, session.batch.asynchronous = None, False
    advance(session, micro)
    session.window.keep(None, None)


def _reach(session: Session, step: int) -> None:
    """Set the number of updates, and the hyperparameters of its schedules."""
    session.state.step = step
    follow_schedules(session, step)
