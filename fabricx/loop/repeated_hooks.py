"""Hooks of a start that run again when a run continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from fabricx.consistency.repeated_hook import RepeatedHook
from fabricx.core.module_state.rng import random_kept
from fabricx.core.strategy_support.optimizer_state import added_once
from fabricx.session.callback_states import restore_changed, states_before

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.session.session import Session


@contextmanager
def run_start(session: Session, *, continues: bool) -> Iterator[None]:
    """Context of the hooks that start a run.

    In a run that continues, random states are kept, and parameter groups are not added to optimizers again. Within an
    epoch, logged values are discarded: those of the first call are part of the epoch's values.

    Args:
        session: session of a fit.
        continues: the run continues an earlier run, or this rank joins it.
    """
    if not continues:
        yield
        return
    logs = session.metrics.logbook.muted() if session.state.batch else nullcontext()
    with random_kept(), added_once(_changed_before(session)), session.fault_tolerance.kept_attributes(), logs:
        yield


def _changed_before(session: Session) -> Sequence[Optimizer]:
    """Return the optimizers that hooks of a start may have changed already."""
    return () if session.checkpoints.new_optimizers else session.optimizers


@contextmanager
def epoch_start(session: Session) -> Iterator[None]:
    """Context of `on_train_epoch_start`.

    If batches of the epoch are trained already, the hook was called before: the state with which the run continues has
    its changes, and further changes are undone.

    Args:
        session: session of a fit.
    """
    if not session.state.batch:
        yield
        session.checkpoints.new_optimizers = False
        return
    weights = RepeatedHook(session.module, _changed_before(session))
    states = states_before(session.callbacks, session.datamodule)
    with run_start(session, continues=True):
        yield
    session.checkpoints.new_optimizers = False
    restore_changed(session.callbacks, session.datamodule, states)
    if undone := weights.undo():
        session.print(
            f"on_train_epoch_start was called again in epoch {session.state.epoch}, after {session.state.batch} "
            f"batches, and its changes of {undone} were undone: the run continues with the changes of the first call"
        )
