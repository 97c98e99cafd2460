"""A batch without a sample of this rank, which runs the collectives of the other ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from fabricx.checkpoint.save_points import follow_hooks
from fabricx.core.manual_optimization import train_without_data
from fabricx.data import Microbatch
from fabricx.loop.accumulation import NO_BATCH
from fabricx.loop.boundary import advance
from fabricx.loop.update import example_batch, update, zero_grad

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def train_without_samples(trainer: Trainer, micro: Microbatch) -> int | None:
    """Run the collectives of a batch without samples; returns -1 if the rest of the epoch is skipped."""
    trainer.idle_ranks = micro.idle
    if micro.idle and follow_hooks(trainer):
        if trainer.shared is not None:
            trainer.shared.check(trainer, skips=True)
        trainer.idle_ranks = 0
        trainer.strategy.forget_window()
        return -1
    trainer.in_step = True
    _compute(trainer, micro)
    trainer.in_step = False
    trainer.window.outputs = trainer.window.batch = None
    for hook in trainer.hooks.train_batch_end_empty:
        hook(None, None, micro.index)
    if micro.idle:
        follow_hooks(trainer)
        trainer.idle_ranks = 0
    return None


def _compute(trainer: Trainer, micro: Microbatch) -> None:
    if micro.size is None:
        source = type(trainer.train_dataloader).__name__
        raise ValueError(
            f"rank {trainer.world.rank}: {source} has ended after {micro.index} batches of this epoch, and its length, "
            "or limit_train_batches, promised more, by which the other ranks have weighted their batches. Give it no "
            "length, or set limit_train_batches to the number that each rank has at least"
        )
    if not trainer.module.automatic_optimization:
        train_without_data(trainer, micro, example_batch(trainer, micro))
        trainer.fault_tolerance.after_own_update(micro)
        advance(trainer, micro)
        return
    if micro.opens:
        zero_grad(trainer, micro)
    with nullcontext() if micro.closes else trainer.strategy.accumulate():
        trainer.window.sit_out(trainer, micro, NO_BATCH, *example_batch(trainer, micro))
    if micro.closes:
        if trainer.window.ready(trainer):
            update(trainer, micro, None)
        else:
            trainer.state.trained += 1
        advance(trainer, micro)
