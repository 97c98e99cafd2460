"""Per-rank record of progress, from which other ranks can continue; without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fabricx.checkpoint.content import run_state, take_up
from fabricx.checkpoint.rank_state import RankState
from fabricx.core.rng import seed_everything
from fabricx.core.state import Stage
from fabricx.data import Microbatch
from fabricx.distributed import heartbeat
from fabricx.distributed.generations import membership

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

NO_SUMS: Final[dict[str, Any]] = {"sums": {}, "logged": {}}  # of a word: an epoch's values are published


def progress(t: Trainer) -> tuple[Any, ...]:
    """Return how far this rank is: greater than before after whatever all ranks do together.

    Last is the generation: a state that its members have taken over is another one, with other sums on each rank.
    """
    state, told = t.state, t.stage > Stage.BATCH_TOLD
    return (
        state.epoch, state.batch, state.samples, t.meeting is not None, state.drained, int(t.stage),
        told and not state.validating, state.closing, t.world.generation,
    )  # fmt: skip


def record_progress(
    t: Trainer, after: Microbatch | None = None, point: RankState | None = None, *, validated: bool = False
) -> None:
    """Leave what only this rank knows where it outlives the process.

    Args:
        t: the trainer.
        after: a batch that the others may have counted before this rank has.
        point: what is to be left; as it is now, if not given.
        validated: a validation is computed, which the others may count before this rank has.
    """
    if t.slot is None:
        return
    key = progress(t)
    if validated:
        key = (*key[:6], t.stage > Stage.BATCH_TOLD, *key[7:])
    if after is not None:
        stage, generation = int(Stage.BATCH_TOLD), t.world.generation
        key = (t.state.epoch, after.index + 1, after.position, False, False, stage, False, False, generation)
    t.slot.write(key, word_of(t, point or RankState(t, objects=t.metric_objects)))


def record_epoch_end(t: Trainer) -> None:
    """Leave word that the epoch's values are published, before the others may count that: its sums are no more."""
    if t.slot is None:
        return
    key = progress(t)
    key = (*key[:5], int(Stage.EPOCH_TOLD), key[6], t.state.drained, *key[8:])
    t.slot.write(key, {**word_of(t, RankState(t)), **NO_SUMS})


def word_of(t: Trainer, point: RankState) -> dict[str, Any]:
    """Return what only this rank knows at a point: also what its batches have made of buffers."""
    return {**point.word(), "buffers": None if t.buffers is None else t.buffers.packed(point)}


def record_progress_ahead(t: Trainer, after: Microbatch) -> None:
    """Leave word of a batch before its gradients leave this rank: with them, others may complete it without this one.

    Where the device isn't a CPU, what was logged would have to be waited for: there it is left before the update.
    """
    if t.slot is None or not after.closes or t.world.device.type != "cpu":
        return
    record_progress(t, after)
    t.told_ahead = not (t.hooks.on_after_backward or _hooks_before_update(t) or _step_is_own(t))


def before_update(t: Trainer, after: Microbatch) -> None:
    """Leave word of a batch of which all is computed but its update, unless that was done ahead.

    Hooks since the backward may have logged, or drawn random numbers, which only this rank knows. So nobody updates
    before all have left word: else a rank that dies in such a hook couldn't be replaced by its equal.
    """
    if t.told_ahead:
        return
    record_progress(t, after)
    if t.hooks.on_after_backward or _hooks_before_update(t):
        t.world.barrier()
    t.told_ahead = not _step_is_own(t)


def after_own_update(t: Trainer, after: Microbatch) -> None:
    """Leave word of a batch whose update the module, or a closure, made: nobody counts it before all have."""
    t.world.settle()
    record_progress(t, after)
    t.world.barrier()
    t.told_ahead = True


def _hooks_before_update(t: Trainer) -> bool:
    return bool(t.hooks.on_before_optimizer_step) or t.overridden.configure_gradient_clipping


def _step_is_own(t: Trainer) -> bool:
    return t.overridden.optimizer_step or t.closures


def take_over(t: Trainer, state: dict[str, Any], place: int | None, *, came: bool) -> None:
    """Go on from the state of the furthest.

    Args:
        t: the trainer.
        state: that state, with what the ranks know by themselves.
        place: which of those is this rank's; None if the sums are the main rank's.
        came: this rank wasn't there before.
    """
    dealer = t.strategy.dealer
    if came:
        seed_everything((state["state"]["seed"] + membership().worker) % 2**32)  # unless it takes another's place
    take_up(t, state, own=place)
    heartbeat.set_reached(state["reached"])
    t.train_logbook.metrics.shared = state["shared"]
    t.torn = False
    for part, training in zip(t.module.modules(), state["modes"], strict=True):
        part.training = training
    if came:  # hooks may have changed it since this rank was set up
        for parameter, trained in zip(t.module.parameters(), state["trained"], strict=True):
            parameter.requires_grad_(trained)
    t.boundary, t.stage, t.meeting = state["boundary"], state["stage"], state["meeting"]
    t.published.step, t.published.open = state["published"]
    if dealer is None:  # a rank whose sums another has now is as if it had had no batch
        t.logbook.batches = state["batches"] if place is not None or t.world.main_rank else 0
        return
    if came:
        t.strategy.starts(t.state.step, t.state.ranks)
    section = dealer.section
    dealer.take_position(state["dealt"])
    if dealer.section != section:  # this worker has come later, or the others have trained a section without it
        dealer.forget_weights()


def standing(t: Trainer) -> dict[str, Any]:
    """Return what all go on from, but for the weights."""
    dealer = t.strategy.dealer
    return {
        **run_state(t),
        "failures": len(t.failures),
        "reached": heartbeat.reached(),
        "boundary": t.boundary,
        "stage": t.stage,
        "meeting": t.meeting,
        "batches": t.logbook.batches,
        "shared": t.train_logbook.metrics.shared,
        "modes": [part.training for part in t.module.modules()],
        "trained": [parameter.requires_grad for parameter in t.module.parameters()],
        "published": (t.published.step, t.published.open),
        "dealt": None if dealer is None else dealer.position(),
    }
