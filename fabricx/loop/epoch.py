"""The start and the end of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricx.core.hook_calls.hooks import call
from fabricx.core.state import EpochStep
from fabricx.loop.boundary import call_last_hooks
from fabricx.loop.evaluation import validate_in_fit
from fabricx.loop.lr_schedules import step_plateaus
from fabricx.loop.manual_optimization import check_options
from fabricx.loop.repeated_hooks import epoch_start
from fabricx.session.checkpoint import recount_batches, report_global_batch
from fabricx.session.finite_weights import warn_of_nonfinite_weights
from fabricx.session.schedule import agree_at_boundary, limit_reached
from fabricx.session.unregistered_parameters import check_registered

if TYPE_CHECKING:
    from fabricx.session.session import Session


def begin_epoch(session: Session) -> bool:
    """Prepare an epoch, or the rest of it.

    Args:
        session: of this rank.

    Returns:
        whether batches are to be trained.
    """
    session.fault_tolerance.begin_epoch()
    session.check_callbacks()
    _reset_logs_and_loaders(session)
    rates = session.checks.local_hyperparameters()
    with epoch_start(session):
        call(session.hooks.on_train_epoch_start)
    if not session.module.automatic_optimization:
        check_options(session)  # a callback may have changed the accumulation
    session.data.check_options()
    check_registered(session, session.optimizers)
    recount_batches(session)
    report_global_batch(session)
    session.checks.compare_ranks(f"at the start of epoch {session.state.epoch}", rates)
    if session.fault_tolerance.epoch_step is EpochStep.BATCH_WATCHERS:  # the last hooks of a batch were interrupted
        call_last_hooks(session, session.state.batch - 1)
    unfinished = session.state.validating or session.state.judging
    if unfinished:  # after a batch that an earlier run has trained
        validate_in_fit(session)
    step_plateaus(session)
    if session.fault_tolerance.meeting is None:  # else its samples are in the weights, and the position is before them
        if (unfinished and agree_at_boundary(session)) or limit_reached(session):
            return False
        # A hook of the epoch's start may have requested the stop.
        if not session.state.batch and agree_at_boundary(session):
            return False
    session.fault_tolerance.begin_batches(saved_within=_saved_within_batches(session))
    session.window.accumulate = session.options.accumulate_grad_batches
    return True


def _reset_logs_and_loaders(session: Session) -> None:
    """Reset the logs of the epoch, and prepare its loader."""
    if not session.state.batch:
        session.metrics.logbook.batches = 0
        if not session.strategy.traits.lockstep:  # a rank that trains no batch of this epoch has no value of a step
            session.metrics.logbook.metrics.forget_steps()
    session.metrics.published.open = True
    session.data.begin_epoch(session.world)


def end_epoch(session: Session) -> None:
    """Validate, if that is due after the last batch, and publish the values of the epoch.

    Args:
        session: of this rank.
    """
    session.check_callbacks()
    session.data.check_options()
    if session.state.validating or session.state.judging:
        validate_in_fit(session)
    if not session.module.automatic_optimization and session.optimizers and not session.state.step:
        session.warn_once(
            "no manual step",
            "no optimizer made a step in the epoch: with automatic_optimization = False, training_step calls "
            "self.manual_backward(loss) and optimizer.step()",
        )
    warn_of_nonfinite_weights(session)
    session.fault_tolerance.before_publishing()
    session.metrics.publish_epoch(ended=False)
    call(session.hooks.train_epoch_end_others)
    session.metrics.log_measured()  # after hooks that are repeated if a rank dies in them: its values would be others
    session.fault_tolerance.after_publishing()
    session.metrics.publish_epoch(ended=True)  # values that the hooks have logged


def _saved_within_batches(session: Session) -> bool:
    """Return whether a checkpoint may be written between the start and the end of a global batch."""
    if (
        session.options.accumulate_grad_batches > 1
        or session.state.ranks > session.world.axis("data").size
        or session.strategy.traits.batch_parts
    ):
        return True
    return bool(session.hooks.on_train_batch_start)  # this hook may save after the data is read
