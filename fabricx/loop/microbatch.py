"""The gradients of a microbatch with automatic optimization: the training step, and its backward with the hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.hook_calls.hooks import call
from fabricx.core.hook_calls.loss import checked_loss
from fabricx.data import Microbatch
from fabricx.distributed.collective_guard import ALL_JOIN, FIXED_PARTS, along, without_sample
from fabricx.loop.no_batch import no_batch_step
from fabricx.loop.update import zero_grad
from fabricx.session.absences import NO_LOSS
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.metrics.collector import Logbook
    from fabricx.session.session import Session


def step_and_backward(
    session: Session, micro: Microbatch, batch: Any
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:  # fmt: skip
    """Return the functions of a microbatch for `Strategy.forward_backward`.

    Args:
        session: its module is optimised automatically.
        micro: share of this rank in the global batch.
        batch: batch on the device.

    Returns:
        the training step; and a function that computes the gradients of the step's outputs, calls the hooks, and
        returns the outputs, or None without a loss.
    """
    guard = without_sample(micro.idle) if micro.idle else ALL_JOIN
    step = session.training_step if batch is not None else no_batch_step(session)
    if session.staged:
        step = functools.partial(_of_part, session.metrics.logbook, step)
    if session.strategy.traits.batch_parts:
        step = functools.partial(_guarded, FIXED_PARTS, step)
    elif micro.idle:
        in_step = along(micro.idle) if session.strategy.traits.joint_steps else guard
        step = functools.partial(_guarded, in_step, step)
    return step, functools.partial(_backward, session, micro, batch, guard)


def _guarded(guard: AbstractContextManager[Any], step: Callable[..., Any], *args: Any) -> Any:
    with guard:
        return step(*args)


def _of_part(logbook: Logbook, step: Callable[..., Any], part: Any, *args: Any) -> Any:
    """Run the step for a part of a batch, whose samples are the weight of logged values."""
    with logbook.part(part):
        return step(part, *args)


def _backward(
    session: Session, micro: Microbatch, batch: Any, guard: AbstractContextManager[Any], outputs: Any
) -> Any:  # fmt: skip
    """Compute the gradients of a step's loss, with the hooks; returns the outputs of the step, None without a loss."""
    session.recorder.lap(Span.FORWARD)
    first, session.window.computing = not session.window.computing, True
    if micro.opens and first:
        zero_grad(session, micro)
    loss = outputs
    if not isinstance(outputs, Tensor) and isinstance(outputs, Mapping) and "loss" in outputs:
        loss = outputs["loss"]
    if loss is None:
        if batch is not None and not session.user_steps.manual_steps:
            session.warn_once(
                "no loss",
                f"training_step returned no loss for a batch (step {session.state.step}), so the batch is skipped: it "
                f"{_effect_of_skipping(session)}. A training_step that steps optimizers itself needs "
                "self.automatic_optimization = False in __init__",
            )
        session.fault_tolerance.before_backward(micro)
        session.window.sit_out(micro, NO_LOSS, session.settings_check)
        return None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        loss = checked_loss(loss)
    if session.overridden.batch_weight:
        if first:
            session.window.weigh(micro)
        if not session.window.factor:
            return _left_out(session, micro, batch, outputs, first=first)
    factor = micro.loss_factor if session.window.factor is None else session.window.factor
    factor *= session.gradient_factor
    scaled = session.precision.scale(loss if factor == 1.0 else loss * factor)
    with guard:
        for hook in session.hooks.on_before_backward:
            hook(loss)
    if first:
        session.fault_tolerance.before_backward(micro)
        session.settings_check.before_backward(micro)
    session.backward(scaled)
    session.recorder.lap(Span.BACKWARD)
    if session.hooks.on_after_backward:
        effects = session.checks.effects() if micro.idle else None  # not before: fsdp reshards weights in the backward
        with session.gradients.hooks_see_gradients() if micro.closes else nullcontext(), guard:
            call(session.hooks.on_after_backward)
        if effects is not None:
            effects.check()
    needed = session.overridden.optimizer_step or session.overridden.closures
    session.window.took_part(micro, loss if needed else None, first=first)
    return outputs


def _effect_of_skipping(session: Session) -> str:
    traits = session.strategy.traits
    if traits.synchronous or not traits.lockstep or session.world.axis("data").size == 1:
        return "has no part in a weight update; without any loss no update is made, and global_step counts none"
    return "adds nothing to the weights, and global_step counts it if another rank may have had a loss"


def _left_out(session: Session, micro: Microbatch, batch: Any, outputs: Any, *, first: bool) -> Any:
    """Run the collectives of the backward for a batch of weight zero."""
    session.window.took_part(micro, first=first)
    if first:
        session.fault_tolerance.before_backward(micro)
        session.settings_check.before_backward(micro)
    if micro.closes or session.strategy.traits.joint_steps:
        with session.metrics.logbook.muted():
            session.strategy.backward_without_data((batch, micro.index))
    return outputs
