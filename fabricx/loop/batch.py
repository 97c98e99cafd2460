"""A batch with samples of this rank, from its first hook to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricx.core.module_state.rng import seed_generators
from fabricx.data import Microbatch
from fabricx.data.order import epoch_seed
from fabricx.loop.batch_hooks import call_end_hooks, call_start_hooks
from fabricx.loop.boundary import begin_batch
from fabricx.loop.manual_optimization import train_manually
from fabricx.loop.microbatch import step_and_backward

if TYPE_CHECKING:
    from fabricx.session.session import Session


@dataclass(frozen=True)
class Synchronization:
    """The parts of a batch that differ between ranks in lockstep and asynchronous ranks.

    Attributes:
        skip_rest: skips the rest of the epoch, because `on_train_batch_start` returned -1.
        update: steps the optimizers with the gradient of a window; its arguments are the session, the last microbatch
            of the window and its data.
        skip_update: counts a window without a gradient.
        advance: sets the position in the data after a window.
    """

    skip_rest: Callable[[Session], None]
    update: Callable[[Session, Microbatch, Any], None]
    skip_update: Callable[[Session, Microbatch], None]
    advance: Callable[[Session, Microbatch], None]


def train_batch(session: Session, micro: Microbatch, sync: Synchronization) -> bool:
    """Train a microbatch with samples.

    Args:
        session: this rank's session.
        micro: the microbatch; the last of a window updates the weights.
        sync: how the ranks of the run synchronise.

    Returns:
        whether the rest of the epoch is skipped.
    """
    hooks = session.hooks
    if session.strategy.traits.batch_parts:  # a part of a global batch draws the same numbers on every rank
        seed_generators(epoch_seed(epoch_seed(session.state.seed, session.state.epoch), micro.begin) % 2**32)
    batch = begin_batch(session, micro)
    if (hooks.on_train_batch_start or micro.idle) and call_start_hooks(session, micro, batch):
        sync.skip_rest(session)
        return True
    session.settings_check.before_forward(micro)
    if micro.opens and session.strategy.traits.batch_parts:
        session.checks.begin_parts()
    session.batch.in_step = True
    if not session.module.automatic_optimization:
        outputs = train_manually(session, micro, batch)
        session.fault_tolerance.after_own_update(micro)
    elif micro.closes:
        step, backward = step_and_backward(session, micro, batch)
        outputs = session.strategy.forward_backward(step, backward, batch, micro.index)
        if session.window.finish_gradient():
            sync.update(session, micro, batch)
        else:
            sync.skip_update(session, micro)
    else:
        # Includes the forward: DDP decides in it whether gradients will be reduced.
        with session.strategy.accumulate():
            step, backward = step_and_backward(session, micro, batch)
            outputs = session.strategy.forward_backward(step, backward, batch, micro.index)
    session.recorder.samples += session.metrics.logbook.size or session.metrics.logbook.count()
    session.batch.in_step = False
    if micro.closes:
        sync.advance(session, micro)
    if hooks.on_train_batch_end or micro.idle:
        call_end_hooks(session, micro, batch, outputs)
    session.metrics.logbook.end_batch()
    return False
