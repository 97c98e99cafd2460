"""The training loop of asynchronous ranks: servers deal leases of the data, and all ranks meet between sections."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fabricx.checkpoint.rank_state import LoggedMark
from fabricx.core.manual_optimization import train_manually
from fabricx.core.optimizers import follow_schedules
from fabricx.core.schedule import check_any_batch, next_section
from fabricx.data import Microbatch
from fabricx.distributed.collective_guard import OWN_PACE
from fabricx.loop.boundary import advance, begin_batch, end_batch, results_of
from fabricx.loop.fit import forward_backward
from fabricx.loop.update import update
from fabricx.metrics.publish import log_step_alone
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def train_batches(trainer: Trainer) -> bool:
    """Train the rest of the epoch's batches; returns whether the epoch is complete."""
    for micro in _batches(trainer):
        trainer.recorder.lap(Span.DATA)
        trainer.window.begin(trainer, micro)
        if not micro.meets:
            with OWN_PACE:
                _train_batch(trainer, micro)
            _end_lease(trainer, micro)
            continue
        _meet(trainer, micro)
        if end_batch(trainer, micro):
            return micro.last
    check_any_batch(trainer)
    return True


def _batches(trainer: Trainer) -> Iterator[Microbatch]:
    """Yield the batches that this rank is dealt in the rest of the epoch, and the points at which all ranks meet."""
    state, meeting = trainer.state, trainer.fault_tolerance.meeting
    if meeting is not None:  # it began in an earlier generation of the group
        yield meeting
    yield from trainer.train_feed.leased(
        trainer.strategy.dealer, functools.partial(next_section, trainer), state.epoch,
        accumulate=trainer.accumulate_grad_batches, position=state.samples, first=state.batch,
    )  # fmt: skip


def _train_batch(trainer: Trainer, micro: Microbatch) -> None:
    """Train a batch of a lease."""
    hooks, index = trainer.hooks, micro.index
    if micro.opens:
        _begin_lease(trainer)
    trainer.apart = True
    batch = begin_batch(trainer, micro)
    for hook in hooks.on_train_batch_start:
        if hook(batch, index) == -1:
            raise ValueError(
                "on_train_batch_start returned -1, which skips the rest of an epoch on all ranks; here each rank works "
                "at its own pace: set trainer.should_stop, or limit_train_batches"
            )
    trainer.in_step = True
    if not trainer.module.automatic_optimization:
        outputs = train_manually(trainer, micro, batch)
    elif micro.closes:
        outputs = forward_backward(trainer, micro, batch)
        if trainer.window.ready(trainer):
            _take_turn(trainer)
            update(trainer, micro, batch)
        else:  # the lease is complete and has no gradient
            trainer.state.step = trainer.strategy.updated(trainer.state.step)
    else:
        with trainer.strategy.accumulate():
            outputs = forward_backward(trainer, micro, batch)
    trainer.recorder.samples += trainer.logbook.size or trainer.logbook.count()
    trainer.in_step = False
    if hooks.on_train_batch_end:
        results = results_of(trainer, outputs, batch)
        for hook in hooks.train_batch_end_others:
            hook(results, batch, index)
    if micro.closes:
        _take_back(trainer)
    trainer.logbook.end_batch()


def _begin_lease(trainer: Trainer) -> None:
    """Begin an accumulation window with the newest weights and their hyperparameters."""
    dealer = trainer.strategy.dealer
    dealer.begin_lease(trainer.logbook.metrics.take_sums)
    _reach(trainer, dealer.next_update())
    _take_back(trainer)  # a round ends if the next lease needs a separate round
    if dealer.may_drop and dealer.begins_update:
        trainer.mark = LoggedMark(trainer)
        dealer.mark()


def _take_back(trainer: Trainer) -> None:
    """Restore logged values and buffers after a dropped gradient: its batches are trained again."""
    if trainer.mark is not None and trainer.strategy.dealer.dropped:
        trainer.mark.restore()
        trainer.strategy.dealer.take_back()
        trainer.mark = None


def _take_turn(trainer: Trainer) -> None:
    """Reserve the number of the next update and set its hyperparameters: other ranks make updates in between."""
    scheduled = any(schedule.interval == "step" for schedule in trainer.lr_schedulers)
    _reach(trainer, trainer.strategy.dealer.take_turn(ordered=scheduled))


def _end_lease(trainer: Trainer, micro: Microbatch) -> None:
    """Log a step of this rank alone, and end its section early if all ranks are asked to meet."""
    if micro.closes:
        log_step_alone(trainer)
        trainer.recorder.end_step(trainer.state.step)
        asked = trainer.agreement is not None and trainer.agreement.reason is not None
        if asked or trainer.outdated:
            trainer.strategy.dealer.close_section()
    if trainer.writer is not None:
        trainer.writer.poll()


def _meet(trainer: Trainer, micro: Microbatch) -> None:
    """Synchronise all ranks after the last lease of a section."""
    _take_back(trainer)
    ft, strategy = trainer.fault_tolerance, trainer.strategy
    ft.meeting = micro
    ft.check_members()
    strategy.quiesce()
    _reach(trainer, strategy.updated(trainer.state.step))
    if trainer.overridden.optimizer_step and trainer.world.size > 1:
        strategy.dealer.join_hyperparameters()
    trainer.train_logbook.metrics.share(strategy.dealer.logged())  # with the position, for a rank that joins later
    ft.meeting, trainer.apart = None, False
    advance(trainer, micro)
    trainer.window.outputs = trainer.window.batch = None


def _reach(trainer: Trainer, step: int) -> None:
    """Set the number of updates, and the hyperparameters of its schedules."""
    trainer.state.step = step
    follow_schedules(trainer, step)
