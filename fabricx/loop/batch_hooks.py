"""Hooks at the start and the end of a batch, which a rank without a sample of the batch does not call.

Such a rank waits until the other ranks have called their hooks, and repeats their checkpoints and changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.hook_calls.steps import detached
from fabricx.data import Microbatch
from fabricx.distributed.collective_guard import ALL_JOIN, without_sample
from fabricx.session.save_points import follow_hooks, publish_hooks_done

if TYPE_CHECKING:
    from fabricx.session.session import Session


def call_start_hooks(session: Session, micro: Microbatch, batch: Any) -> bool:
    """Call `on_train_batch_start`, and publish its effects to the ranks without a sample.

    Args:
        session: this rank's session.
        micro: share of this rank in the global batch.
        batch: batch on the device.

    Returns:
        whether the rest of the epoch is skipped.
    """
    hooks, skips = session.hooks, False
    session.batch.idle_ranks = len(micro.idle)
    effects = session.checks.effects() if micro.idle else None
    with without_sample(micro.idle) if micro.idle else ALL_JOIN:
        for number, hook in enumerate(hooks.on_train_batch_start):
            if skips := hooks.skips_epoch(number, hook(batch, micro.index)):
                break
    if effects is not None:
        publish_hooks_done(session, effects.changes(), skip=skips)
    return skips


def call_end_hooks(session: Session, micro: Microbatch, batch: Any, outputs: Any) -> None:
    """Call `on_train_batch_end`, except of callbacks that watch metrics; publish its effects as `call_start_hooks`.

    Args:
        session: this rank's session.
        micro: share of this rank in the global batch.
        batch: batch on the device.
        outputs: outputs of the training step; hooks receive them without their graph.
    """
    hooks, effects = session.hooks, None
    guard: AbstractContextManager[Any] = ALL_JOIN
    if micro.idle:
        session.serving.wait_for_weights(session.state.step)  # hooks don't change weights that arrive in them
        effects, guard = session.checks.effects(), without_sample(micro.idle)
    outputs = {} if outputs is None else outputs  # as in Lightning
    results = {"loss": outputs.detach()} if isinstance(outputs, Tensor) else detached(outputs)
    session.window.keep(results, batch)
    for hook in hooks.train_batch_end_others:
        with ALL_JOIN if hook in hooks.train_batch_end_empty else guard:
            hook(results, batch, micro.index)
    if effects is not None:
        publish_hooks_done(session, effects.changes())
        session.batch.idle_ranks = 0


def follow_start_hooks(session: Session, micro: Microbatch) -> bool:
    """Repeat the effects of the other ranks' `on_train_batch_start` on a rank without a sample.

    Args:
        session: this rank's session.
        micro: without samples of this rank.

    Returns:
        whether the rest of the epoch is skipped.
    """
    session.batch.idle_ranks = len(micro.idle)
    return bool(micro.idle) and follow_hooks(session)


def follow_end_hooks(session: Session, micro: Microbatch) -> None:
    """Call the hooks that accept a batch without samples, and repeat the effects of the other ranks' hooks.

    Args:
        session: this rank's session.
        micro: without samples of this rank.
    """
    session.window.keep(None, None)
    for hook in session.hooks.train_batch_end_empty:
        hook(None, None, micro.index)
    if micro.idle:
        follow_hooks(session)
        session.batch.idle_ranks = 0
