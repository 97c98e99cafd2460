"""The update of the weights with the gradient of an accumulation window."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.data import Microbatch
from fabricx.loop import manual_optimization
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
                if session.overridden.kept is None
                else session.overridden.kept.zeroes(optimizer)
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
            _clip(session, optimizer, own_clipping=own_clipping)
        session.fault_tolerance.before_update(micro)
        if session.overridden.optimizer_step or session.overridden.closures:
            _step_with_closure(session, micro, batch, optimizer)
        else:
            session.precision.step(optimizer, session.strategy.optimizer_step)
    session.precision.updated()
    if session.overridden.manual_steps:
        _count_early_steps(session)
        session.warn_once(
            "early steps",
            "training_step steps an optimizer itself and returns a loss, whose gradient makes a second step. A module "
            "that makes all its steps itself needs self.automatic_optimization = False in __init__",
        )
    _count_update(session)
    session.recorder.lap(Span.OPTIMIZER)


def step_optimizer(
    session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None, **options: Any
) -> Any:  # fmt: skip
    """Step an optimizer for the module: in manual optimization, or in its `optimizer_step`.

    Args:
        session: this rank's session.
        optimizer: optimizer of the module.
        closure: computes the loss and the gradients; None without.
        options: further arguments of the optimizer's `step`.

    Returns:
        the loss of the first call of the closure in manual optimization; otherwise None.

    Raises:
        ValueError: servers step the optimizer, which have no further arguments.
    """
    if options:
        if session.serving.servers:
            raise ValueError(
                f"step({', '.join(f'{name}=...' for name in options)}): servers run the step of "
                f"{type(optimizer).__name__}, without these arguments; set them in the constructor of the optimizer"
            )
        with _step_with(optimizer, options):
            return step_optimizer(session, optimizer, closure)
    with session.gradients.weights_as_stored():
        session.fault_tolerance.begin_update()
        if session.module.automatic_optimization and session.batch.in_step and not session.overridden.in_optimizer_step:
            return _step_early(session, optimizer, closure)
        if session.module.automatic_optimization:
            session.overridden.own_steps += 1
            used = closure if id(optimizer) in session.overridden.closures else None
            session.precision.step(optimizer, session.strategy.optimizer_step, used)
            return None
        return manual_optimization.step(session, optimizer, closure)


def _step_early(session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Step an optimizer for a `training_step` that steps it itself, although the module is optimised automatically."""
    if session.world.size > 1 or session.serving.servers:
        raise ValueError(
            f"training_step calls the step of {type(optimizer).__name__} itself, and with several ranks automatic "
            "optimization averages only the gradients of a returned loss: set self.automatic_optimization = False in "
            "__init__, and compute the gradients with self.manual_backward(loss)"
        )

    def clip() -> None:
        _clip(session, optimizer, own_clipping=session.overridden.configure_gradient_clipping)

    return manual_optimization.count_step(session, optimizer, closure, clip)


@contextlib.contextmanager
def _step_with(optimizer: Optimizer, options: Mapping[str, Any]) -> Iterator[None]:
    """Context in which each call of an optimizer's `step` has further arguments."""
    wrapper, step = vars(optimizer).get("step"), optimizer.step  # a scheduler has its own wrapper in the object
    vars(optimizer)["step"] = functools.partial(step, **options)
    try:
        yield
    finally:
        if wrapper is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = wrapper


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
    elif session.overridden.manual_steps:
        _count_early_steps(session, besides=1)
        _count_update(session)
    else:
        session.state.trained += 1
        count_without_update(session)


def _count_early_steps(session: Session, *, besides: int = 0) -> None:
    """Count the steps that `training_step` has made itself: those of the optimizer that stepped most often."""
    steps = session.overridden.manual_steps
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


def _clip(session: Session, optimizer: Optimizer, *, own_clipping: bool) -> None:
    """Call the hooks that may read the gradient of an update, and clip it."""
    limit = session.options.gradient_clip_val
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
        if batch is None:  # other ranks compute
            session.strategy.backward_without_data(example_batch(micro, session.to_device))
            return _global_loss(session, micro, None)
        outputs = session.training_step(batch, micro.index)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        session.backward(loss * ((session.window.again or micro.factor) * session.gradient_factor))
        return _global_loss(session, micro, loss.detach())

    gradients, overridden = session.gradients, session.overridden
    overridden.own_steps, overridden.in_optimizer_step = 0, True
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, overridden, "in_optimizer_step", False)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(gradients.hooks_see_gradients())
        stack.enter_context(gradients.hooks_see_weights("optimizer_step"))
        stack.enter_context(session.checks.unchanged_in_step())
        session.module.optimizer_step(session.state.epoch, micro.index, session.handle_of(optimizer), closure)
    if overridden.own_steps != 1 and session.serving.weight_pulls is not None:
        raise ValueError(
            f"optimizer_step calls the step of {type(optimizer).__name__} {overridden.own_steps} times for this batch, "
            "but servers step once for each batch: set accumulate_grad_batches for fewer steps, return None from "
            "training_step to skip a batch, or use parameter_server with optimizer='worker' and mode='sync', or "
            "strategy=ddp"
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
        factor = session.window.again or micro.factor
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
