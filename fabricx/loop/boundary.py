"""The start and the end of a batch: transfer, position, last hooks, validation, agreed stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.checkpoint.save_points import publish_hooks_done
from fabricx.core.schedule import agree_at_boundary, limit_reached, validation_due
from fabricx.core.state import Stage
from fabricx.core.steps import detached
from fabricx.data import Microbatch
from fabricx.distributed import heartbeat
from fabricx.loop.evaluation import validate_in_fit
from fabricx.metrics.publish import log_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def begin_batch(trainer: Trainer, micro: Microbatch) -> Any:
    """Return the data of a batch on the device."""
    trainer.in_step = True  # for the hooks of the transfer
    heartbeat.advance()
    batch = micro.data if trainer.bring is None else trainer.bring(micro.data, 0)
    trainer.in_step = False
    trainer.is_last_batch = micro.last
    trainer.logbook.begin_batch(batch, micro.size, trainer.state.step + 1)
    if trainer.bring is not None:
        trainer.recorder.lap(Span.TRANSFER)
    return batch


def results_of(trainer: Trainer, outputs: Any, batch: Any) -> Any:
    """Return the outputs of a step without their graph, for the hooks that end a batch."""
    results = {"loss": outputs.detach()} if isinstance(outputs, Tensor) else detached(outputs)
    trainer.window.outputs, trainer.window.batch = results, batch
    return results


def advance(trainer: Trainer, micro: Microbatch) -> None:
    """Set the position in the data after a batch: a checkpoint that is written from now on continues with the next."""
    state = trainer.state
    if micro.start is not None and micro.start != state.samples:
        state.jump(micro.start)
    state.batch, state.samples = micro.index + 1, micro.position
    state.passed += 1
    state.validating = validation_due(trainer, micro)
    trainer.in_step = False
    trainer.fault_tolerance.after_batch()


def end_batch(trainer: Trainer, micro: Microbatch) -> bool:
    """Log, validate and agree to stop after a batch, on all ranks; returns whether training stops."""
    call_last_hooks(trainer, micro.index, closes=micro.closes)
    if trainer.writer is not None:
        trainer.writer.poll()
    if trainer.state.validating if micro.closes else validation_due(trainer, micro):
        validate_in_fit(trainer)
    if not micro.closes:
        return False
    if agree_at_boundary(trainer) or limit_reached(trainer):
        return True
    trainer.fault_tolerance.after_step()
    return False


def call_last_hooks(trainer: Trainer, index: int, *, closes: bool = True) -> None:
    """Log a step, and call the last hooks of a batch: their checkpoints contain the position after the batch.

    Args:
        trainer: of this rank.
        index: of the batch in its epoch.
        closes: the batch completes an accumulation window.
    """
    if closes:
        log_step(trainer)
    for hook in trainer.hooks.train_batch_end_watching:
        hook(trainer.window.outputs, trainer.window.batch, index)
    if closes:
        trainer.fault_tolerance.stage = Stage.BETWEEN
        trainer.recorder.end_step(trainer.state.step)


def skip_rest(trainer: Trainer, micro: Microbatch) -> int:
    """Skip the rest of the epoch, on all ranks; returns -1."""
    if micro.idle:
        publish_hooks_done(trainer, skip=True)
        trainer.idle_ranks = 0
    if trainer.shared is not None:
        trainer.shared.check(trainer, skips=True)
    trainer.strategy.forget_window()
    trainer.logbook.end_batch()
    return -1
