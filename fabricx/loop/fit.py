"""The training loop, from top to bottom in the order of the hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fabricx.core.hook_calls.hooks import call
from fabricx.core.state import EpochStep, Phase
from fabricx.core.strategy_support.optimizer_state import let_groups_grow
from fabricx.errors import PossibleUserWarning
from fabricx.loop.epoch import begin_epoch, end_epoch
from fabricx.loop.evaluation import sanity_check
from fabricx.loop.lr_schedules import step_schedules
from fabricx.loop.repeated_hooks import run_start
from fabricx.session.checkpoint import finish_checkpoint, restore_requested
from fabricx.session.schedule import (
    agree_at_boundary,
    already_complete,
    batches_of_epoch,
    end_pending,
    epoch_pending,
    limit_reached,
    reached_limits,
    validation_due_at_end,
)
from fabricx.session.trained_parameters import note_set_up

if TYPE_CHECKING:
    from fabricx.session.session import Session


def fit(session: Session, train_rest: Callable[[Session], bool]) -> None:
    """Train from where `session.state` is until a limit is reached or a stop is requested.

    Args:
        session: this rank's session; its run is set up.
        train_rest: trains the rest of an epoch's batches; returns whether the epoch is complete.
    """
    state, ft = session.state, session.fault_tolerance
    if not _start(session):
        session.metrics.collect(None)
        call(session.hooks.on_fit_end)
        return
    first = (state.step, state.passed)  # before a replacement has the state of the other ranks
    ft.join_run()
    session.recorder.begin()
    complete = False
    while not complete:
        with ft.recovering():
            while _unfinished(session):
                train_epoch(session, train_rest)
                session.checks.compare_ranks(f"after step {state.step}")
                session.checks.compare_weights()
            if state.batch and not session.stop.interrupted:  # also if an earlier run has ended it
                state.cut_short = True
            if first == (state.step, state.passed) and state.step > 0 and not session.stop.interrupted:
                session.print(already_complete(session))
            session.synchronize(ends=True)  # hooks and users now see the weights of all ranks
            session.metrics.collect(None)
            ft.before_train_end()
            call(session.hooks.on_train_end)
            finish_checkpoint(session)
            ft.wait_for_all()
            complete = True
    ft.end_recovery()
    call(session.hooks.on_fit_end)


def _start(session: Session) -> bool:
    """Run the hooks before the first epoch, and restore the position; return whether a batch or a hook remains."""
    state, newcomer = session.state, session.world.newcomer
    session.checks.note_parameters()  # before hooks, which may add groups of tensors that no rank exchanges
    call(session.hooks.on_fit_start)
    note_set_up(session)
    for optimizer in session.optimizers:
        let_groups_grow(optimizer)
    _restore(session)
    resumed = bool(state.step or state.batch or state.drained)  # a batch may have made no step
    if not resumed and not newcomer:
        sanity_check(session)
    if state.closing and session.fault_tolerance.epoch_step is EpochStep.BETWEEN:  # resumed from the end of an epoch
        _close_epoch(session)
    state.phase = Phase.TRAIN
    _report_eval_modes(session)
    if not newcomer and not _unfinished(session) and (not resumed or session.checkpoints.new_optimizers):
        if state.step:
            session.print(already_complete(session))
        elif session.options.max_steps:  # such as limit_train_batches=0; max_steps=0 sets up a run, and no more
            session.print(f"there is nothing to train: {reached_limits(session)}")
        return False
    if session.checkpoints.new_optimizers:
        session.print(
            f"this run continues after {state.step} steps of an earlier fit with its weights, and with new "
            "optimizers and schedules; set ckpt_path='last' to continue with those of the newest checkpoint"
        )
    session.metrics.collect(session.metrics.training)
    with run_start(session, continues=resumed or newcomer):
        call(session.hooks.on_train_start)
    if not newcomer:  # hooks of the start, or a callback of an earlier run, may have requested the stop
        if session.checkpoints.delayed_stop:
            session.trainer.request_stop(session.checkpoints.delayed_stop)
        agree_at_boundary(session)
    return True


def _restore(session: Session) -> None:
    """Restore in-memory checkpoints, or the checkpoint of the call; a newcomer receives the state of other ranks."""
    state = session.state
    if session.world.newcomer or session.fault_tolerance.restore():  # these have the state of servers, too
        return
    # After an earlier fit of this Trainer without a checkpoint:
    session.checkpoints.new_optimizers = bool(state.step) and session.checkpoints.ckpt_path is None
    restore_requested(session)
    session.serving.on_train_start(state.step, state.ranks)


def _report_eval_modes(session: Session) -> None:
    """Warn of submodules in evaluation mode, which training keeps: dropout and batch statistics are off in these."""
    root = type(session.module).__name__
    if names := [name or root for name, part in session.module.named_modules() if not part.training]:
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        session.warn_once(
            "modes",
            f"training begins with {len(names)} module(s) in evaluation mode, which is kept: {listed}. Frozen batch "
            "normalisation needs this; otherwise call train() on the module before fit or in on_fit_start",
            PossibleUserWarning,
        )


def _unfinished(session: Session) -> bool:
    """Return whether batches remain, or the end of an epoch is incomplete."""
    ends = EpochStep.EPOCH_ENDS <= session.fault_tolerance.epoch_step < EpochStep.EPOCH_OVER
    return not limit_reached(session) or epoch_pending(session) or end_pending(session) or ends


def train_epoch(session: Session, train_rest: Callable[[Session], bool]) -> None:
    """Train the rest of an epoch; a checkpoint may have been written at each stage of an epoch.

    Args:
        session: this rank's session.
        train_rest: as in `fit`.
    """
    state, ft = session.state, session.fault_tolerance
    state.cut_short = False
    if not state.drained and ft.epoch_step < EpochStep.EPOCH_ENDS:
        state.ended_early = False
        state.drained = train_rest(session) if begin_epoch(session) else epoch_pending(session)
        state.validating = validation_due_at_end(session, state.drained)
        state.validated = state.validated or state.validating
        ft.resume_point = None
    if session.stop.interrupted and not state.drained:  # a later run will complete the epoch
        session.metrics.publish_step()
        return
    if not state.closing and ft.epoch_step < EpochStep.EPOCH_WATCHERS:
        ft.reach(EpochStep.EPOCH_ENDS)
        end_epoch(session)
        state.closing, state.ended_early = state.drained, not state.drained
        ft.reach(EpochStep.EPOCH_WATCHERS)
    if ft.epoch_step is EpochStep.EPOCH_WATCHERS:
        with ft.watching():
            call(session.hooks.train_epoch_end_watching)
        ft.epoch_step = EpochStep.EPOCH_OVER
    if not state.drained:
        state.cut_short = True
        return
    _close_epoch(session)
    ft.reach(EpochStep.BETWEEN)
    agree_at_boundary(session)


def _close_epoch(session: Session) -> None:
    """Advance the schedules of a complete epoch, whose hooks have run, and count it."""
    step_schedules(session, "epoch", session.state.epoch + 1)
    session.state.next_epoch(batches_of_epoch(session))
