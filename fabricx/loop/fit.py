"""The training loop, from top to bottom in the order of the hooks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricx.checkpoint.content import count_again, say_change
from fabricx.checkpoint.rank_state import BufferCopies, LoggedMark, RankState
from fabricx.checkpoint.save_points import follow_hooks, hooks_done
from fabricx.consistency.hook_effects import HookEffects, compare_ranks, compare_weights, own_rates
from fabricx.core.hooks import Hook
from fabricx.core.manual_optimization import check_options, train_manually, train_without_data
from fabricx.core.optimizers import follow_schedules, step_schedules
from fabricx.core.rng import random_kept, seed_everything
from fabricx.core.schedule import (
    agree_at_boundary,
    check_any_batch,
    epoch_pending,
    finished,
    limit_reached,
    next_section,
    validation_due,
    validation_due_at_end,
)
from fabricx.core.state import Phase, Stage
from fabricx.core.steps import checked_loss, detached
from fabricx.data import Microbatch
from fabricx.data.order import epoch_seed
from fabricx.distributed.collective_guard import ALL_JOIN, NO_SAMPLE, apart
from fabricx.distributed.generations import membership
from fabricx.fault_tolerance.progress import (
    after_own_update,
    before_update,
    record_epoch_end,
    record_progress,
    record_progress_ahead,
)
from fabricx.fault_tolerance.recovery import recover, take_part
from fabricx.fault_tolerance.rollback import come_back
from fabricx.loop.accumulation import NO_BATCH, NO_LOSS
from fabricx.loop.evaluation import sanity_check, validate_in_fit
from fabricx.metrics.objects import metric_objects
from fabricx.metrics.publish import log_measured, log_step, log_step_alone, publish_epoch, publish_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def call(hook: Hook, *args: Any) -> None:
    """Call every function of a hook, in order."""
    for function in hook:
        function(*args)


def fit(t: Trainer, job: object = None) -> None:
    """Train from where `t.state` is until a limit is reached or somebody asks to stop."""
    call(t.hooks.on_fit_start)
    t.rank_state, t.epoch_end, t.stage, t.meeting = None, None, Stage.BETWEEN, None
    if not t.world.newcomer:
        if t.memory_checkpointer is None or t.members is not None or not come_back(t):
            t.restore()
        t.strategy.starts(t.state.step, t.state.ranks)
    begun = bool(t.state.step or t.state.batch or t.state.drained)  # by an earlier run; a batch may be no step
    if not begun and not t.world.newcomer:
        sanity_check(t)
    t.state.phase = Phase.TRAIN
    t.module.train()
    with _again(begun or t.world.newcomer):
        call(t.hooks.on_train_start)
    if begun and not t.world.newcomer:  # a callback may find that an earlier run has stopped for good
        agree_at_boundary(t)
    begun_at = t.state.step
    take_part(t)
    t.recorder.begin()
    while True:
        try:
            while _goes_on(t):
                train_epoch(t)
                compare_ranks(t, f"after step {t.state.step}")
                compare_weights(t)
            if begun_at == t.state.step > 0 and not t.interrupted:
                t.print(finished(t))
            t.strategy.finish()  # whoever looks at the weights from now on sees those of all ranks
            call(t.hooks.on_train_end)
            t.finish_checkpoint()
            if (
                t.members is not None or t.memory_checkpointer is not None
            ):  # none leaves while another may need it for going on
                t.world.barrier()
            break
        except Exception as error:
            t.in_step = t.apart = False
            t.idle_ranks = 0
            recover(t, error)
    membership().say("outside")
    call(t.hooks.on_fit_end)


def _goes_on(t: Trainer) -> bool:
    """Return whether something is left to train, or of an epoch that is trained."""
    return not limit_reached(t) or t.state.validating or t.state.judging or epoch_pending(t) or _epoch_ends(t)


def _epoch_ends(t: Trainer) -> bool:
    return Stage.EPOCH_ENDS <= t.stage < Stage.EPOCH_OVER


def train_epoch(t: Trainer) -> None:
    """Train one epoch, or what is left of it: a checkpoint may have been taken at each of its stages."""
    state = t.state
    if not state.drained and t.stage < Stage.EPOCH_ENDS:
        state.drained = _train_batches(t)
        state.validating = validation_due_at_end(t, state.drained)
        # Where the epoch isn't complete, what the end of this run does to its sums isn't part of it.
        t.rank_state = None if state.drained else RankState(t)
    if t.interrupted and not state.drained:  # another run will complete the epoch
        publish_step(t)
        return
    if not state.closing and t.stage < Stage.EPOCH_TOLD:
        t.stage = Stage.EPOCH_ENDS
        record_progress(t)
        _end_epoch(t)
        t.state.closing = t.state.drained
        t.stage, t.epoch_end = Stage.EPOCH_TOLD, None
        record_progress(t)
    if t.stage is Stage.EPOCH_TOLD:
        call(t.hooks.train_epoch_end_watching)
        t.stage = Stage.EPOCH_OVER
    if not state.drained:
        return
    step_schedules(t, "epoch", state.epoch + 1)
    state.epoch += 1
    state.batch = state.samples = 0
    state.drained = state.closing = False
    t.stage = Stage.BETWEEN
    record_progress(t)
    agree_at_boundary(t)


def _end_epoch(t: Trainer) -> None:
    """Validate, if that waited for the last batch, and tell everybody what the epoch has given."""
    if t.state.validating or t.state.judging:
        validate_in_fit(t)
    if t.slot is not None:  # a reduction of the sums may end on some ranks, which then have none, and not on others
        t.epoch_end = RankState(t)
    publish_epoch(t)
    log_measured(t)
    call(t.hooks.train_epoch_end_others)
    record_epoch_end(t)
    publish_epoch(t)  # what the hooks have logged


def _train_batches(t: Trainer) -> bool:
    """Train batch after batch; returns whether the epoch was completed."""
    t.buffers = buffers = BufferCopies(t.module, t.buffers) if t.strategy.dealer is None else None
    point = None if buffers is None else RankState(t, buffers.take())
    if not t.state.batch:  # should the first batch be begun again, so will the epoch: its hooks come after this point
        t.rank_state = point
    t.begin_epoch()
    rates = own_rates(t)
    with _again(t.state.batch):
        call(t.hooks.on_train_epoch_start)
    if not t.module.automatic_optimization:
        check_options(t)  # a callback may have changed the accumulation
    count_again(t)
    say_change(t)
    compare_ranks(t, f"at the start of epoch {t.state.epoch}", rates)
    accumulate = t.accumulate_grad_batches
    if not _begun_again(t):
        t.buffers = buffers = None
    if t.stage is Stage.BATCH_TOLD:  # by a group that somebody has left since
        _tell_last(t, t.state.batch - 1)
    if t.state.validating or t.state.judging:  # of the batch before, which an earlier run has trained
        validate_in_fit(t)
        if agree_at_boundary(t) or limit_reached(t):
            return epoch_pending(t)
    t.metric_objects = metric_objects(t.module) if t.slot is not None else None
    feed = _feed(t)
    if buffers is not None:
        t.rank_state = point = RankState(t, buffers.take()) if t.state.batch else point
        record_progress(t, point=point)
    for micro in feed:
        t.recorder.lap(Span.DATA)
        if t.accumulate_grad_batches != accumulate:
            raise ValueError(
                f"accumulate_grad_batches was changed from {accumulate} to {t.accumulate_grad_batches} within an "
                "epoch, whose global batches are cut already: change it in on_train_epoch_start, or with the callback "
                "GradientAccumulation"
            )
        if micro.opens:
            t.window.begin(micro.planned)
        if micro.meets:
            _meet(t, micro)
        elif (_train_nothing if micro.empty else train_batch)(t, micro) == -1:
            if micro.apart:
                raise ValueError(
                    "on_train_batch_start returned -1, which skips the rest of an epoch on all ranks; here each "
                    "goes at its own pace: set trainer.should_stop, or limit_train_batches"
                )
            return True
        if micro.apart:
            _go_on_apart(t, micro)
            continue
        _tell_last(t, micro.index, closes=micro.closes)
        if t.writer is not None:
            t.writer.poll()
        if t.state.validating if micro.closes else validation_due(t, micro):
            validate_in_fit(t)
        if micro.closes and (agree_at_boundary(t) or limit_reached(t)):
            return micro.last
        if micro.closes and t.members is not None:
            t.check_members()
        if micro.closes and t.memory_checkpointer is not None:
            t.memory_checkpointer.after_step(t)
        if micro.closes and buffers is not None:
            t.rank_state = RankState(t, buffers.take(), t.metric_objects)
            record_progress(t, point=t.rank_state)  # hooks, and a validation, may have logged, or drawn random numbers
    check_any_batch(t)
    return True


def _begun_again(t: Trainer) -> bool:
    """Return whether a checkpoint, or a fault, may come when a global batch is begun and not done."""
    several = t.accumulate_grad_batches > 1 or t.state.ranks > t.world.size or t.strategy.parts > 0
    return several or t.members is not None or bool(t.hooks.on_train_batch_start)  # a hook may save when data is read


def _tell_last(t: Trainer, index: int, *, closes: bool = True) -> None:
    """Give a batch to those that come last: a checkpoint has to hold the position after it."""
    if closes:
        log_step(t)
    for hook in t.hooks.train_batch_end_watching:
        hook(t.window.outputs, t.window.batch, index)
    if closes:
        t.stage = Stage.BETWEEN
        t.recorder.end_step(t.state.step)


def _feed(t: Trainer) -> Iterator[Microbatch]:
    """Return the batches of the epoch from where this rank is: its own, or those that it is dealt."""
    state, dealer = t.state, t.strategy.dealer
    if t.meeting is not None:  # it has begun, in a group that somebody has left since
        yield t.meeting
    place: Any = {"accumulate": t.accumulate_grad_batches, "position": state.samples, "first": state.batch}
    if dealer is None:
        yield from t.train_feed.epoch(state.epoch, **place)
    else:
        yield from t.train_feed.leased(dealer, functools.partial(next_section, t), state.epoch, **place)


def _go_on_apart(t: Trainer, micro: Microbatch) -> None:
    """Between two batches of a rank that goes at its own pace: nothing that others would have to take part in."""
    if micro.closes:
        log_step_alone(t)
        t.recorder.end_step(t.state.step)
        if (t.agreement is not None and t.agreement.reason is not None) or t.outdated:
            t.strategy.dealer.close_section()
    if t.writer is not None:
        t.writer.poll()


def _meet(t: Trainer, micro: Microbatch) -> None:
    """Bring ranks together that went at their own pace: all is done that was dealt."""
    t.meeting = micro
    t.check_members()
    t.strategy.quiesce()
    t.state.step = t.strategy.updated(t.state.step)
    follow_schedules(t, t.state.step)
    if t.overridden.optimizer_step and t.world.size > 1:
        t.strategy.dealer.join_hyperparameters()
    t.train_logbook.metrics.share(t.strategy.dealer.logged())  # with the position, for a rank that comes later
    t.meeting, t.apart = None, False
    _advance(t, micro)
    t.window.outputs = t.window.batch = None


def _count_update(t: Trainer) -> None:
    """Count an update, and let the schedules follow; those of ranks that go at their own pace follow in `_reach`."""
    t.state.step = t.strategy.updated(t.state.step + 1)
    if t.strategy.dealer is None:
        t.state.trained += 1
        if t.overridden.metrics_each_step and t.world.size > 1:
            publish_step(t)
        step_schedules(t, "step", t.state.step)


def _reach(t: Trainer, update: int) -> None:
    """Be at an update, with its hyperparameters: others make updates too, in between."""
    t.state.step = update
    follow_schedules(t, update)


def _again(done: int) -> AbstractContextManager[None]:
    """Return a context for hooks that a run which wasn't stopped here wouldn't have called once more."""
    return random_kept() if done else nullcontext()


def train_batch(t: Trainer, micro: Microbatch) -> int | None:
    """Train one batch; returns -1 if the rest of the epoch is to be skipped."""
    hooks, module, index = t.hooks, t.module, micro.index
    if t.strategy.parts:  # what is drawn for a part of a global batch is the same on whatever rank
        seed_everything(epoch_seed(epoch_seed(t.state.seed, t.state.epoch), micro.begin) % 2**32)
    if micro.apart and micro.opens:
        _begin_apart(t)
    t.apart = micro.apart
    t.in_step = True  # for hooks of the transfer
    batch = t.to_device(micro.data, 0)
    t.in_step = False
    t.is_last_batch = micro.last
    t.logbook.begin_batch(batch, micro.size, t.state.step + 1)
    if t.bring is not None:
        t.recorder.lap(Span.TRANSFER)
    t.idle_ranks = micro.idle
    noted = HookEffects(t) if micro.idle else None
    skips = False
    with apart(NO_SAMPLE) if micro.idle else ALL_JOIN:
        for hook in hooks.on_train_batch_start:
            if skips := hook(batch, index) == -1:
                break
    if skips:
        return _skip_rest(t, micro)
    if noted is not None:
        hooks_done(t, noted.changes(t))
    if t.shared is not None:
        t.shared.before_forward(t, micro)
    t.in_step = True
    if not module.automatic_optimization:
        outputs = train_manually(t, micro, batch)
        if t.slot is not None:
            after_own_update(t, micro)
    elif micro.closes:
        outputs = _forward_backward(t, micro, batch)
        if t.window.ready(t):
            _update(t, micro, batch)
        elif micro.apart:  # the lease is done, and has given nothing
            t.state.step = t.strategy.updated(t.state.step)
        else:
            t.state.trained += 1
    else:
        # The forward is under `accumulate` too: DDP decides there whether gradients will travel.
        with t.strategy.accumulate():
            outputs = _forward_backward(t, micro, batch)
    t.recorder.samples += t.logbook.size or t.logbook.count()
    t.in_step = False
    if micro.closes and not micro.apart:
        _advance(t, micro)
    if micro.idle:
        t.strategy.weights_step(t.state.step)  # weights that come while a hook looks at them are no change of a hook
    noted = HookEffects(t) if micro.idle else None
    if hooks.on_train_batch_end:
        results = {"loss": outputs.detach()} if isinstance(outputs, Tensor) else detached(outputs)
        t.window.outputs, t.window.batch = results, batch
        for hook in hooks.train_batch_end_others:
            with apart(NO_SAMPLE) if micro.idle and hook not in hooks.train_batch_end_empty else ALL_JOIN:
                hook(results, batch, index)
    if noted is not None:
        hooks_done(t, noted.changes(t))
        t.idle_ranks = 0
    if t.mark is not None and micro.closes and t.strategy.dealer.dropped:
        t.mark.restore()
    t.logbook.end_batch()
    return None


def _skip_rest(t: Trainer, micro: Microbatch) -> int:
    """Skip the rest of the epoch, on all ranks."""
    if micro.idle:
        hooks_done(t, skip=True)
        t.idle_ranks = 0
    if t.shared is not None:
        t.shared.check(t, skips=True)
    t.strategy.forget_window()
    t.logbook.end_batch()
    return -1


def _begin_apart(t: Trainer) -> None:
    """Begin a window of a rank that goes at its own pace: with the newest weights, and their hyperparameters."""
    dealer = t.strategy.dealer
    dealer.begin_lease(t.logbook.metrics.take_sums)
    _reach(t, dealer.next_update())
    t.mark = LoggedMark(t) if dealer.may_drop else None


def _advance(t: Trainer, micro: Microbatch) -> None:
    """Let a checkpoint that is written from now on begin with the next batch."""
    if micro.start is not None and micro.start != t.state.samples:
        t.state.jump(micro.start)
    t.state.batch, t.state.samples = micro.index + 1, micro.position
    t.state.passed += 1
    t.state.validating = validation_due(t, micro)
    t.rank_state, t.torn, t.in_step, t.stage = None, False, False, Stage.BATCH_TOLD
    if t.slot is not None and not t.told_ahead:
        record_progress(t)
    t.told_ahead = False


def _forward_backward(t: Trainer, micro: Microbatch, batch: Any) -> Any:
    with apart(NO_SAMPLE) if micro.idle and not t.strategy.traits.sharded else ALL_JOIN:
        outputs = t.training_step(batch, micro.index)
    t.recorder.lap(Span.FORWARD)
    if micro.opens:
        _zero_grad(t, micro)
    loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else outputs
    if loss is None:
        record_progress_ahead(t, micro)
        t.window.sit_out(t, micro, NO_LOSS)
        return None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        loss = checked_loss(loss)
    if t.overridden.batch_weight and not t.window.weigh(t, micro):
        return _left_out(t, micro, batch, outputs)
    factor = (micro.factor if t.window.factor is None else t.window.factor) * t.strategy.gradient_factor
    scaled = t.precision_plugin.scale(loss if factor == 1.0 else loss * factor)
    with apart(NO_SAMPLE) if micro.idle else ALL_JOIN:
        for hook in t.hooks.on_before_backward:
            hook(loss)
    if t.slot is not None:
        record_progress_ahead(t, micro)
    if t.shared is not None:
        t.shared.before_backward(t, micro)
    t.backward(scaled)
    t.recorder.lap(Span.BACKWARD)
    if t.hooks.on_after_backward:
        noted = HookEffects(t) if micro.idle else None  # not before: fsdp shards the weights again in the backward
        with (
            t.strategy.hooks_see_gradients() if micro.closes else nullcontext(),
            apart(NO_SAMPLE) if micro.idle else ALL_JOIN,
        ):
            call(t.hooks.on_after_backward)
        if noted is not None:
            noted.check(t)
    t.window.took_part(micro, loss)
    return outputs


def _left_out(t: Trainer, micro: Microbatch, batch: Any, outputs: Any) -> Any:
    """Go on with a batch whose loss is the mean of nothing."""
    t.window.took_part(micro)
    record_progress_ahead(t, micro)
    if t.shared is not None:
        t.shared.before_backward(t, micro)
    if micro.closes or t.strategy.traits.sharded:
        with t.logbook.muted():
            t.strategy.backward_nothing(batch, micro.index)
    return outputs


def _zero_grad(t: Trainer, micro: Microbatch) -> None:
    for optimizer in t.optimizers:
        for hook in t.hooks.on_before_zero_grad:
            hook(optimizer)
        if t.overridden.optimizer_zero_grad:
            t.module.optimizer_zero_grad(t.state.epoch, micro.index, optimizer)
        else:
            optimizer.zero_grad()


def _update(t: Trainer, micro: Microbatch, batch: Any) -> None:
    """Update the weights with the gradient of a whole window; several optimizers step together."""
    if t.slot is not None:  # with garbage in its weights, a rank that has no copy of them couldn't go on
        t.world.settle()
    if micro.apart:
        scheduled = any(schedule.interval == "step" for schedule in t.lr_schedulers)
        _reach(t, t.strategy.dealer.take_turn(ordered=scheduled))
    for optimizer in t.optimizers:
        t.precision_plugin.unscale(optimizer)
        own_clipping = t.overridden.configure_gradient_clipping
        if t.hooks.on_before_optimizer_step or t.gradient_clip_val is not None or own_clipping:
            _show_and_clip(t, optimizer, own_clipping=own_clipping)
        if t.slot is not None:
            before_update(t, micro)
        t.torn = t.strategy.dealer is None
        if t.overridden.optimizer_step or t.closures:
            _update_with_closure(t, micro, batch, optimizer)
        else:
            t.precision_plugin.step(optimizer, t.strategy.step)
    t.precision_plugin.updated()
    _count_update(t)
    t.recorder.lap(Span.OPTIMIZER)


def _show_and_clip(t: Trainer, optimizer: torch.optim.Optimizer, *, own_clipping: bool) -> None:
    """Let hooks see the gradient of an update, and clip it."""
    if t.hooks.on_before_optimizer_step or own_clipping:
        with t.strategy.hooks_see_gradients():
            call(t.hooks.on_before_optimizer_step, optimizer)
            if own_clipping:
                t.module.configure_gradient_clipping(optimizer, t.gradient_clip_val, t.gradient_clip_algorithm)
    if t.gradient_clip_val is not None and not own_clipping:
        t.clip_gradients(optimizer, t.gradient_clip_val, t.gradient_clip_algorithm)


def _update_with_closure(t: Trainer, micro: Microbatch, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """Update through the module's own `optimizer_step`, or with an optimizer that computes the loss by itself."""
    if t.window.planned > 1 and id(optimizer) in t.overridden.closures:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss of one batch again, and a global batch is "
            f"{t.window.planned} microbatches on this rank, as {t.state.ranks} ranks began this run: go on with as "
            "many ranks as the run began with"
        )
    fresh = True  # the gradient of this window is there already: the first call has nothing to compute

    def closure() -> Any:
        nonlocal fresh
        if fresh:
            fresh = False
            return _global_loss(t, micro, t.window.loss)
        optimizer.zero_grad()
        if batch is None:  # the others compute
            t.strategy.backward_nothing(*_company(t, micro))
            return _global_loss(t, micro, None)
        outputs = t.training_step(batch, micro.index)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        t.backward(loss * ((t.window.again or micro.factor) * t.strategy.gradient_factor))
        return _global_loss(t, micro, loss.detach())

    with torch.enable_grad(), t.strategy.hooks_see_gradients():
        t.module.optimizer_step(t.state.epoch, micro.index, t.handle_of(optimizer), closure)
    if t.slot is not None:
        after_own_update(t, micro)


def _global_loss(t: Trainer, micro: Microbatch, loss: Tensor | None) -> Tensor | None:
    """Return the loss of the global batch: an optimizer that looks at it has to decide the same on all ranks."""
    if t.world.size == 1 or not t.strategy.traits.synchronous:
        return loss
    share = torch.zeros((), dtype=torch.float64, device=t.world.device)
    if loss is not None:
        share += loss * (t.window.again or micro.factor)
    return t.world.all_reduce(share)


def _train_nothing(t: Trainer, micro: Microbatch) -> int | None:
    """Take part in a batch of which this rank has no sample; returns -1 if the rest of the epoch is to be skipped."""
    t.idle_ranks = micro.idle
    if micro.idle and follow_hooks(t):
        if t.shared is not None:
            t.shared.check(t, skips=True)
        t.idle_ranks = 0
        t.strategy.forget_window()
        return -1
    t.in_step = True
    _compute_nothing(t, micro)
    t.in_step = False
    t.window.outputs = t.window.batch = None
    for hook in t.hooks.train_batch_end_empty:
        hook(None, None, micro.index)
    if micro.idle:
        follow_hooks(t)
        t.idle_ranks = 0
    return None


def _compute_nothing(t: Trainer, micro: Microbatch) -> None:
    if micro.size is None:
        raise ValueError(
            f"rank {t.world.rank}: {type(t.train_dataloader).__name__} has ended after {micro.index} batches of this "
            "epoch, and its length, or limit_train_batches, promised more: the other ranks have weighted their "
            "batches with that. Give it no length, or say with limit_train_batches how many each rank has at least"
        )
    if not t.module.automatic_optimization:
        train_without_data(t, micro, _company(t, micro))
        if t.slot is not None:
            after_own_update(t, micro)
        _advance(t, micro)
        return
    if micro.opens:
        _zero_grad(t, micro)
    with nullcontext() if micro.closes else t.strategy.accumulate():
        t.window.sit_out(t, micro, NO_BATCH, *_company(t, micro))
    if micro.closes:
        if t.window.ready(t):
            _update(t, micro, None)
        else:
            t.state.trained += 1
        _advance(t, micro)


def _company(t: Trainer, micro: Microbatch) -> tuple[Any, ...]:
    return () if micro.data is None else (t.to_device(micro.data, 0), micro.index)
