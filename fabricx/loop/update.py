"""The update of the weights with the gradient of an accumulation window."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.data import Microbatch
from fabricx.loop.lr_schedules import step_schedules
from fabricx.session.schedule import count_update, count_without_update
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.session.session import Session


def zero_grad(session: Session, micro: Microbatch) -> None:
    """Clear the gradients before the first backward of a window.

    Args:
        session: this rank's session.
        micro: the first microbatch of the window.
    """
    for optimizer in session.optimizers:
        for hook in session.hooks.on_before_zero_grad:
            hook(optimizer)
        if session.overridden.optimizer_zero_grad:
            kept = (
                contextlib.nullcontext()
                if session.user_steps.kept is None
                else session.user_steps.kept.zeroes(optimizer)
            )
            with kept, session.gradients.hooks_see_weights("optimizer_zero_grad"), session.checks.zeroes(optimizer):
                session.module.optimizer_zero_grad(session.state.epoch, micro.index, optimizer)
        else:
            optimizer.zero_grad()


def update(session: Session, micro: Microbatch, batch: Any) -> None:
    """Step all optimizers with the gradient of a whole window.

    Args:
        session: this rank's session.
        micro: the last microbatch of the window.
        batch: its data; None if this rank has no sample of it.
    """
    session.fault_tolerance.settle()
    if session.checks.at_first_part is not None:
        session.checks.check_parts()
    for optimizer in session.optimizers:
        session.precision.unscale(optimizer)
        own_clipping = session.overridden.configure_gradient_clipping
        if session.hooks.on_before_optimizer_step or session.options.gradient_clip_val is not None or own_clipping:
            clip(session, optimizer)
        session.fault_tolerance.before_update(micro)
        if session.overridden.optimizer_step or session.overridden.closures:
            _step_with_closure(session, micro, batch, optimizer)
        else:
            session.precision.step(optimizer, session.strategy.optimizer_step)
    session.precision.updated()
    if session.user_steps.manual_steps:
        _count_early_steps(session)
        session.warn_once(
            "early steps",
            "training_step steps an optimizer itself and returns a loss, whose gradient makes a second step. A module "
            "that makes all its steps itself needs self.automatic_optimization = False in __init__",
        )
    _count_update(session)
    session.recorder.lap(Span.OPTIMIZER)


def skip_update(session: Session, micro: Microbatch) -> None:
    """Count a window of this rank without a gradient; ranks are in lockstep.

    Args:
        session: this rank's session.
        micro: the last microbatch of the window.
    """
    if not session.strategy.traits.synchronous and session.world.axis("data").size > 1:
        # Other ranks may have made a local step, and rounds and schedules are those of all ranks.
        session.fault_tolerance.settle()
        session.fault_tolerance.before_update(micro)
        _count_update(session)
    elif session.user_steps.manual_steps:
        _count_early_steps(session, besides=1)
        _count_update(session)
    else:
        session.state.trained += 1
        count_without_update(session)


def _count_early_steps(session: Session, *, besides: int = 0) -> None:
    """Count the steps that `training_step` has made itself: those of the optimizer that stepped most often."""
    steps = session.user_steps.manual_steps
    for _ in range(max(steps.values()) - besides):
        count_update(session)
    steps.clear()


def _count_update(session: Session) -> None:
    """Count an update, and step the schedules; asynchronous ranks step them at each new lease."""
    count_update(session)
    session.batch.without_update = 0
    if session.strategy.traits.lockstep:
        session.state.trained += 1
        step_schedules(session, "step", session.state.step, metrics=False)


def clip(session: Session, optimizer: Optimizer) -> None:
    """Call the hooks that may read the gradient of an update, and clip it.

    Args:
        session: this rank's session.
        optimizer: steps next; its gradients have no loss scale.
    """
    limit, own_clipping = session.options.gradient_clip_val, session.overridden.configure_gradient_clipping
    if session.hooks.on_before_optimizer_step or own_clipping:
        with session.gradients.hooks_see_gradients():
            for hook in session.hooks.on_before_optimizer_step:
                hook(optimizer)
            if own_clipping:
                with session.gradients.hooks_see_weights("configure_gradient_clipping"):
                    session.module.configure_gradient_clipping(
                        optimizer, session.options.gradient_clip_val, session.options.gradient_clip_algorithm
                    )
    if limit is not None and not own_clipping:
        session.clip_gradients(optimizer, limit, session.options.gradient_clip_algorithm)


def _step_with_closure(session: Session, micro: Microbatch, batch: Any, optimizer: Optimizer) -> None:
    """Step through the module's own `optimizer_step`, or with an optimizer that computes the loss again."""
    if session.window.planned > 1 and id(optimizer) in session.overridden.closures:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss of a batch several times, but this run began with "
            f"{session.state.ranks} ranks, so that a global batch is divided into {session.window.planned} "
            f"microbatches on this rank: continue with {session.state.ranks} ranks"
        )
    fresh = True  # the first call returns the loss of the backward that has run already

    def closure() -> Any:
        with session.gradients.weights_as_stored():
            return computed()

    def computed() -> Any:
        nonlocal fresh
        if fresh:
            fresh = False
            return _global_loss(session, micro, session.window.loss)
        if session.strategy.traits.batch_parts:
            raise ValueError(
                f"optimizer_step computes the loss again for a step of {type(optimizer).__name__}, but "
                "deterministic='elastic' sums the gradients of the parts of a global batch once per update: call the "
                "closure once, or use strategy=ddp"
            )
        if session.window.planned > 1:
            raise ValueError(
                f"optimizer_step computes the loss again for a step of {type(optimizer).__name__}, but the gradient is "
                f"accumulated over {session.window.planned} microbatches, of which only the last is known: call the "
                f"closure once, or remove what divides a batch (accumulate_grad_batches={session.window.accumulate}; "
                f"the run began with {session.state.ranks} ranks)"
            )
        optimizer.zero_grad()
        loss = None
        if batch is None:  # other ranks compute
            session.strategy.backward_without_data(example_batch(micro, session.to_device))
        else:
            outputs = session.training_step(batch, micro.index)
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            factor = session.window.global_loss_factor or micro.loss_factor
            session.backward(loss * (factor * session.gradient_factor))
            loss = loss.detach()
        clip(session, optimizer)
        return _global_loss(session, micro, loss)

    gradients, user_steps = session.gradients, session.user_steps
    user_steps.own_steps, user_steps.in_optimizer_step = 0, True
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, user_steps, "in_optimizer_step", False)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(gradients.hooks_see_gradients())
        stack.enter_context(gradients.hooks_see_weights("optimizer_step"))
        stack.enter_context(session.checks.unchanged_in_step())
        session.module.optimizer_step(session.state.epoch, micro.index, session.handle_of(optimizer), closure)
    if user_steps.own_steps != 1 and session.serving.servers_step:
        raise ValueError(
            f"optimizer_step calls the step of {type(optimizer).__name__} {user_steps.own_steps} times for this batch, "
            "but servers step once for each batch: set accumulate_grad_batches for fewer steps, return None from "
            "training_step to skip a batch, or use parameter_server with optimizer='worker' and mode='sync', or "
            "strategy=ddp"
        )
    if fresh and user_steps.own_steps == 0:
        session.warn_once(
            "no own step",
            f"optimizer_step neither steps the {type(optimizer).__name__} that it receives nor calls its closure: the "
            "weights do not change, and the step is counted. Call optimizer.step(closure=optimizer_closure)",
        )
    session.fault_tolerance.after_own_update(micro)


def _global_loss(session: Session, micro: Microbatch, loss: Tensor | None) -> Tensor | None:
    """Return the mean loss of a microbatch over the ranks that step together; None if no rank has a loss.

    An optimizer that reads it has to decide the same on all of them.
    """
    world = session.strategy.step_ranks
    if world.size == 1:
        return loss
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    if loss is not None:
        factor = session.window.global_loss_factor or micro.loss_factor
        sums += torch.stack((loss.detach().to(sums) * factor, torch.full_like(sums[0], factor)))
    world.all_reduce(sums)
    return sums[0] / sums[1] if sums[1] else None


def example_batch(micro: Microbatch, to_device: Callable[[Any, int], Any]) -> tuple[Any, ...]:
    """Return the arguments with which a rank without samples computes along: (batch, index), or () without a batch.

    Args:
        micro: this rank's microbatch; its data are a sample of another rank.
        to_device: transfers (batch, loader index) to the device.
    """
    return () if micro.data is None else (to_device(micro.data, 0), micro.index)
