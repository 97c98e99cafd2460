"""The start and the end of a batch: transfer, position, last hooks, validation, agreed stops."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fabricx.core.state import EpochStep
from fabricx.core.tensors.transfer import with_own_move
from fabricx.data import Microbatch
from fabricx.distributed.activity import heartbeat
from fabricx.loop.evaluation import validate_in_fit
from fabricx.loop.lr_schedules import step_plateaus
from fabricx.session.schedule import agree_at_boundary, limit_reached, validation_due
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.session.session import Session


def begin_batch(session: Session, micro: Microbatch) -> Any:
    """Return the data of a batch on the device.

    Args:
        session: this rank's session.
        micro: the microbatch that begins.
    """
    session.batch.in_step = True  # for the hooks of the transfer
    heartbeat.advance()
    batch = with_own_move(micro.data) if session.transfer is None else session.transfer(micro.data, 0)
    session.batch.in_step = False
    forget_skipped(session, micro)
    session.batch.is_last, session.batch.index = micro.last, micro.index
    session.batch.total = session.state.before + micro.index
    session.metrics.logbook.begin_batch(batch, None if micro.user_batch else micro.size, session.state.step + 1)
    if session.transfer is not None:
        session.recorder.lap(Span.TRANSFER)
    return batch


def forget_skipped(session: Session, micro: Microbatch) -> None:
    """Forget values that a window without an update has logged, at the start of the next: both have its number.

    Args:
        session: this rank's session.
        micro: the microbatch that begins.
    """
    skipped = session.batch.without_update or session.batch.index < 0  # a checkpoint can be saved after such a window
    if micro.opens and ((skipped and session.module.automatic_optimization) or not micro.closes):
        session.metrics.logbook.forget_step(session.state.step + 1)


def advance(session: Session, micro: Microbatch) -> None:
    """Set the position in the data after a batch: a checkpoint that is written from now on continues with the next.

    Args:
        session: this rank's session.
        micro: the last microbatch of a window.
    """
    state = session.state
    state.advance(micro.index + 1, micro.window_begin, micro.window_end)
    state.last = micro.last
    if micro.idle or state.buffer_source:
        idle, data = set(micro.idle), session.world.axis("data")
        ranks = (rank for rank in range(data.size) if not idle.issuperset(data.ranks_of_run([rank])))
        state.buffer_source = next(ranks, 0)
        session.set_buffer_source()
    state.validating = state.validated = validation_due(session, micro)
    session.fault_tolerance.after_batch()


def end_batch(session: Session, micro: Microbatch) -> bool:
    """Log, validate and agree to stop after a batch, on all ranks.

    Args:
        session: this rank's session.
        micro: the microbatch that ends.

    Returns:
        whether training stops.
    """
    call_last_hooks(session, micro.index, closes=micro.closes)
    session.checkpoints.poll()
    if session.state.validating if micro.closes else validation_due(session, micro):
        validate_in_fit(session)
    if not micro.closes:
        return False
    step_plateaus(session)
    if agree_at_boundary(session) or limit_reached(session):
        return True
    session.fault_tolerance.after_step()
    return False


def call_last_hooks(session: Session, index: int, *, closes: bool = True) -> None:
    """Log a step, and call the last hooks of a batch: their checkpoints contain the position after the batch.

    Args:
        session: this rank's session.
        index: index of the batch in its epoch.
        closes: the batch completes an accumulation window.
    """
    if closes:
        session.metrics.log_step(session.recorder, session.optimizers, session.window.norm)
    ft = session.fault_tolerance
    if watching := session.hooks.train_batch_end_watching:
        with ft.watching() if ft.repeats_batch_watchers else nullcontext():
            for hook in watching:
                hook(session.window.outputs, session.window.batch, index)
    if closes:
        ft.epoch_step = EpochStep.BETWEEN
        session.recorder.end_step(session.state.step)


def skip_rest(session: Session) -> None:
    """Skip the rest of the epoch, on all ranks, because `on_train_batch_start` returned -1.

    Args:
        session: this rank's session.
    """
    session.batch.idle_ranks = 0
    session.settings_check.check(skips=True)
    session.strategy.discard_window()
    session.metrics.logbook.end_batch()
    session.batch.is_last = True
