"""The training loop, from top to bottom in the order of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.checkpoint.rank_state import RankState
from fabricx.checkpoint.save_points import publish_hooks_done
from fabricx.consistency.hook_effects import HookEffects, compare_ranks, compare_weights
from fabricx.core.hooks import call
from fabricx.core.manual_optimization import train_manually
from fabricx.core.optimizers import step_schedules
from fabricx.core.rng import seed_everything
from fabricx.core.schedule import (
    agree_at_boundary,
    check_any_batch,
    epoch_pending,
    finished,
    limit_reached,
    validation_due_at_end,
)
from fabricx.core.state import Phase, Stage
from fabricx.core.steps import checked_loss
from fabricx.data import Microbatch
from fabricx.data.order import epoch_seed
from fabricx.distributed.collective_guard import ALL_JOIN, NO_SAMPLE
from fabricx.loop.accumulation import NO_LOSS
from fabricx.loop.boundary import advance, begin_batch, end_batch, results_of, skip_rest
from fabricx.loop.epoch import begin_epoch, end_epoch, repeated_hooks
from fabricx.loop.evaluation import sanity_check
from fabricx.loop.no_samples import train_without_samples
from fabricx.loop.update import update, zero_grad
from fabricx.metrics.publish import publish_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def fit(trainer: Trainer, train_batches: Callable[[Trainer], bool]) -> None:
    """Train from where `trainer.state` is until a limit is reached or a stop is requested.

    Args:
        trainer: of this rank; its run is set up.
        train_batches: trains the rest of an epoch's batches; returns whether the epoch is complete.
    """
    state, ft, newcomer = trainer.state, trainer.fault_tolerance, trainer.world.newcomer
    call(trainer.hooks.on_fit_start)
    if not newcomer:
        if not ft.restore():
            trainer.restore()
        trainer.strategy.starts(state.step, state.ranks)
    resumed = bool(state.step or state.batch or state.drained)  # a batch may have made no step
    if not resumed and not newcomer:
        sanity_check(trainer)
    state.phase = Phase.TRAIN
    trainer.module.train()
    with repeated_hooks(resumed or newcomer):
        call(trainer.hooks.on_train_start)
    if resumed and not newcomer:  # a callback of an earlier run may have requested the stop
        agree_at_boundary(trainer)
    first_step = state.step
    ft.start()
    trainer.recorder.begin()
    complete = False
    while not complete:
        with ft.guard():
            while _unfinished(trainer):
                train_epoch(trainer, train_batches)
                compare_ranks(trainer, f"after step {state.step}")
                compare_weights(trainer)
            if first_step == state.step > 0 and not trainer.interrupted:
                trainer.print(finished(trainer))
            trainer.strategy.finish()  # hooks and users now see the weights of all ranks
            call(trainer.hooks.on_train_end)
            trainer.finish_checkpoint()
            ft.wait_for_all()
            complete = True
    ft.leave()
    call(trainer.hooks.on_fit_end)


def _unfinished(trainer: Trainer) -> bool:
    """Return whether batches remain, or the end of an epoch is incomplete."""
    state = trainer.state
    ends = Stage.EPOCH_ENDS <= trainer.fault_tolerance.stage < Stage.EPOCH_OVER
    return not limit_reached(trainer) or state.validating or state.judging or epoch_pending(trainer) or ends


def train_epoch(trainer: Trainer, train_batches: Callable[[Trainer], bool]) -> None:
    """Train the rest of an epoch; a checkpoint may have been written at each stage of an epoch."""
    state, ft = trainer.state, trainer.fault_tolerance
    if not state.drained and ft.stage < Stage.EPOCH_ENDS:
        over = begin_epoch(trainer)
        state.drained = train_batches(trainer) if over is None else over
        state.validating = validation_due_at_end(trainer, state.drained)
        # The end of a run changes the sums of an incomplete epoch: a checkpoint contains the sums before.
        ft.resume_point = None if state.drained else RankState(trainer)
    if trainer.interrupted and not state.drained:  # a later run will complete the epoch
        publish_step(trainer)
        return
    if not state.closing and ft.stage < Stage.EPOCH_TOLD:
        ft.reach(Stage.EPOCH_ENDS)
        end_epoch(trainer)
        state.closing = state.drained
        ft.reach(Stage.EPOCH_TOLD)
    if ft.stage is Stage.EPOCH_TOLD:
        call(trainer.hooks.train_epoch_end_watching)
        ft.stage = Stage.EPOCH_OVER
    if not state.drained:
        return
    step_schedules(trainer, "epoch", state.epoch + 1)
    state.epoch += 1
    state.batch = state.samples = 0
    state.drained = state.closing = False
    ft.reach(Stage.BETWEEN)
    agree_at_boundary(trainer)


def train_batches(trainer: Trainer) -> bool:
    """Train the rest of the epoch's batches; returns whether the epoch is complete."""
    state, accumulate = trainer.state, trainer.accumulate_grad_batches
    for micro in trainer.train_feed.epoch(
        state.epoch, accumulate=accumulate, position=state.samples, first=state.batch
    ):
        trainer.recorder.lap(Span.DATA)
        trainer.window.begin(trainer, micro)
        if (train_without_samples if micro.empty else train_batch)(trainer, micro) == -1:
            return True
        if end_batch(trainer, micro):
            return micro.last
    check_any_batch(trainer)
    return True


def train_batch(trainer: Trainer, micro: Microbatch) -> int | None:
    """Train a batch; returns -1 if the rest of the epoch is skipped."""
    hooks, index = trainer.hooks, micro.index
    if trainer.strategy.parts:  # a part of a global batch draws the same numbers on every rank
        seed_everything(epoch_seed(epoch_seed(trainer.state.seed, trainer.state.epoch), micro.begin) % 2**32)
    batch = begin_batch(trainer, micro)
    trainer.idle_ranks = micro.idle
    effects = HookEffects(trainer) if micro.idle else None
    guard = NO_SAMPLE if micro.idle else ALL_JOIN
    skips = False
    with guard:
        for hook in hooks.on_train_batch_start:
            if skips := hook(batch, index) == -1:
                break
    if skips:
        return skip_rest(trainer, micro)
    if effects is not None:
        publish_hooks_done(trainer, effects.changes(trainer))
    if trainer.shared is not None:
        trainer.shared.before_forward(trainer, micro)
    trainer.in_step = True
    if not trainer.module.automatic_optimization:
        outputs = train_manually(trainer, micro, batch)
        trainer.fault_tolerance.after_own_update(micro)
    elif micro.closes:
        outputs = forward_backward(trainer, micro, batch)
        if trainer.window.ready(trainer):
            update(trainer, micro, batch)
        else:
            trainer.state.trained += 1
    else:
        # Includes the forward: DDP decides in it whether gradients will be reduced.
        with trainer.strategy.accumulate():
            outputs = forward_backward(trainer, micro, batch)
    trainer.recorder.samples += trainer.logbook.size or trainer.logbook.count()
    trainer.in_step = False
    if micro.closes:
        advance(trainer, micro)
    if micro.idle:
        trainer.strategy.weights_step(trainer.state.step)  # weights that arrive in a hook aren't changed by that hook
    effects = HookEffects(trainer) if micro.idle else None
    if hooks.on_train_batch_end:
        results = results_of(trainer, outputs, batch)
        for hook in hooks.train_batch_end_others:
            with ALL_JOIN if hook in hooks.train_batch_end_empty else guard:
                hook(results, batch, index)
    if effects is not None:
        publish_hooks_done(trainer, effects.changes(trainer))
        trainer.idle_ranks = 0
    trainer.logbook.end_batch()
    return None


def forward_backward(trainer: Trainer, micro: Microbatch, batch: Any) -> Any:
    """Run the training step and its backward; returns the outputs of the step, None without a loss."""
    guard = NO_SAMPLE if micro.idle else ALL_JOIN
    with ALL_JOIN if trainer.strategy.traits.sharded else guard:
        outputs = trainer.training_step(batch, micro.index)
    trainer.recorder.lap(Span.FORWARD)
    if micro.opens:
        zero_grad(trainer, micro)
    loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else outputs
    if loss is None:
        trainer.fault_tolerance.before_backward(micro)
        trainer.window.sit_out(trainer, micro, NO_LOSS)
        return None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        loss = checked_loss(loss)
    if trainer.overridden.batch_weight and not trainer.window.weigh(trainer, micro):
        return _left_out(trainer, micro, batch, outputs)
    factor = micro.factor if trainer.window.factor is None else trainer.window.factor
    factor *= trainer.strategy.gradient_factor
    scaled = trainer.precision_plugin.scale(loss if factor == 1.0 else loss * factor)
    with guard:
        for hook in trainer.hooks.on_before_backward:
            hook(loss)
    trainer.fault_tolerance.before_backward(micro)
    if trainer.shared is not None:
        trainer.shared.before_backward(trainer, micro)
    trainer.backward(scaled)
    trainer.recorder.lap(Span.BACKWARD)
    if trainer.hooks.on_after_backward:
        effects = HookEffects(trainer) if micro.idle else None  # not before: fsdp reshards weights in the backward
        with trainer.strategy.hooks_see_gradients() if micro.closes else nullcontext(), guard:
            call(trainer.hooks.on_after_backward)
        if effects is not None:
            effects.check(trainer)
    trainer.window.took_part(micro, loss)
    return outputs


def _left_out(trainer: Trainer, micro: Microbatch, batch: Any, outputs: Any) -> Any:
    """Run the collectives of the backward for a batch of weight zero."""
    trainer.window.took_part(micro)
    trainer.fault_tolerance.before_backward(micro)
    if trainer.shared is not None:
        trainer.shared.before_backward(trainer, micro)
    if micro.closes or trainer.strategy.traits.sharded:
        with trainer.logbook.muted():
            trainer.strategy.backward_nothing(batch, micro.index)
    return outputs
