"""The update of the weights with the gradient of an accumulation window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.core.optimizers import step_schedules
from fabricx.data import Microbatch
from fabricx.metrics.publish import publish_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def zero_grad(trainer: Trainer, micro: Microbatch) -> None:
    """Clear the gradients before the first backward of a window."""
    for optimizer in trainer.optimizers:
        for hook in trainer.hooks.on_before_zero_grad:
            hook(optimizer)
        if trainer.overridden.optimizer_zero_grad:
            trainer.module.optimizer_zero_grad(trainer.state.epoch, micro.index, optimizer)
        else:
            optimizer.zero_grad()


def update(trainer: Trainer, micro: Microbatch, batch: Any) -> None:
    """Step all optimizers with the gradient of a whole window.

    Args:
        trainer: of this rank.
        micro: the last microbatch of the window.
        batch: its data; None if this rank has no sample of it.
    """
    trainer.fault_tolerance.settle()
    for optimizer in trainer.optimizers:
        trainer.precision_plugin.unscale(optimizer)
        own_clipping = trainer.overridden.configure_gradient_clipping
        if trainer.hooks.on_before_optimizer_step or trainer.gradient_clip_val is not None or own_clipping:
            _clip(trainer, optimizer, own_clipping=own_clipping)
        trainer.fault_tolerance.before_update(micro)
        if trainer.overridden.optimizer_step or trainer.closures:
            _step_with_closure(trainer, micro, batch, optimizer)
        else:
            trainer.precision_plugin.step(optimizer, trainer.strategy.step)
    trainer.precision_plugin.updated()
    _count_update(trainer)
    trainer.recorder.lap(Span.OPTIMIZER)


def _count_update(trainer: Trainer) -> None:
    """Count an update, and step the schedules; asynchronous ranks step them at each new lease."""
    trainer.state.step = trainer.strategy.updated(trainer.state.step + 1)
    if trainer.strategy.dealer is None:
        trainer.state.trained += 1
        if trainer.overridden.metrics_each_step and trainer.world.size > 1:
            publish_step(trainer)
        step_schedules(trainer, "step", trainer.state.step)


def _clip(trainer: Trainer, optimizer: Optimizer, *, own_clipping: bool) -> None:
    """Call the hooks that may read the gradient of an update, and clip it."""
    limit = trainer.gradient_clip_val
    if trainer.hooks.on_before_optimizer_step or own_clipping:
        with trainer.strategy.hooks_see_gradients():
            for hook in trainer.hooks.on_before_optimizer_step:
                hook(optimizer)
            if own_clipping:
                trainer.module.configure_gradient_clipping(
                    optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
    if limit is not None and not own_clipping:
        trainer.clip_gradients(optimizer, limit, trainer.gradient_clip_algorithm)


def _step_with_closure(trainer: Trainer, micro: Microbatch, batch: Any, optimizer: Optimizer) -> None:
    """Step through the module's own `optimizer_step`, or with an optimizer that computes the loss again."""
    if trainer.window.planned > 1 and id(optimizer) in trainer.overridden.closures:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss of one batch again, and a global batch is "
            f"{trainer.window.planned} microbatches on this rank, as {trainer.state.ranks} ranks began this run: "
            "continue with that number of ranks"
        )
    fresh = True  # the first call returns the loss of the backward that has run already

    def closure() -> Any:
        nonlocal fresh
        if fresh:
            fresh = False
            return _global_loss(trainer, micro, trainer.window.loss)
        optimizer.zero_grad()
        if batch is None:  # other ranks compute
            trainer.strategy.backward_nothing(*example_batch(trainer, micro))
            return _global_loss(trainer, micro, None)
        outputs = trainer.training_step(batch, micro.index)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        trainer.backward(loss * ((trainer.window.again or micro.factor) * trainer.strategy.gradient_factor))
        return _global_loss(trainer, micro, loss.detach())

    with torch.enable_grad(), trainer.strategy.hooks_see_gradients():
        trainer.module.optimizer_step(trainer.state.epoch, micro.index, trainer.handle_of(optimizer), closure)
    trainer.fault_tolerance.after_own_update(micro)


def _global_loss(trainer: Trainer, micro: Microbatch, loss: Tensor | None) -> Tensor | None:
    """Return the loss of the global batch: an optimizer that reads it has to decide the same on all ranks."""
    if trainer.world.size == 1 or not trainer.strategy.traits.synchronous:
        return loss
    share = torch.zeros((), dtype=torch.float64, device=trainer.world.device)
    if loss is not None:
        share += loss * (trainer.window.again or micro.factor)
    return trainer.world.all_reduce(share)


def example_batch(trainer: Trainer, micro: Microbatch) -> tuple[Any, ...]:
    """Return the arguments with which a rank without samples computes along: (batch, index), or () without a batch."""
    return () if micro.data is None else (trainer.to_device(micro.data, 0), micro.index)
