"""How far a rank is, and all that it needs to be known for another to go on from there; weights aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Variable

from fabricx.checkpointing import run_state, take_up
from fabricx.comm import pulse
from fabricx.comm.generations import membership
from fabricx.data import Microbatch
from fabricx.restart_point import RestartPoint
from fabricx.seed import seed_everything
from fabricx.state import Stage

if TYPE_CHECKING:
    from fabricx.trainer import Trainer


def progress(t: Trainer) -> tuple[Any, ...]:
    """Return how far this rank is: greater than before after whatever all ranks do together."""
    state, told = t.state, t.stage > Stage.BATCH_TOLD
    return (
        state.epoch, state.batch, state.samples, t.meeting is not None, state.drained, int(t.stage),
        told and not state.validating, state.closing,
    )  # fmt: skip


def leave_word(t: Trainer, after: Microbatch | None = None) -> None:
    """Leave what only this rank knows where it outlives the process.

    Args:
        t: the trainer.
        after: a batch that the others may have counted before this rank has.
    """
    if t.slot is None:
        return
    key = progress(t)
    if after is not None:
        key = (t.state.epoch, after.index + 1, after.position, False, False, int(Stage.BATCH_TOLD), False, False)
    t.slot.write(key, RestartPoint(t, objects=t.metric_objects).word())


def leave_word_meanwhile(t: Trainer, after: Microbatch, loss: Tensor) -> None:
    """Leave word of a batch during its backward, while the last gradients travel, if all is known by then."""
    if t.hooks.on_after_backward or not _only_update_left(t):
        return
    if t.world.device.type != "cpu":  # it would have to be waited for once more
        return

    def computed() -> None:
        leave_word(t, after)
        t.told_ahead = True

    # What is queued where a backward begins is called before DDP waits: that queues its waiting later.
    loss.register_hook(lambda _: Variable._execution_engine.queue_callback(computed))  # type: ignore[attr-defined]


def before_update(t: Trainer, after: Microbatch) -> None:
    """Leave word of a batch of which all is computed but its update, unless that was done meanwhile.

    Where a group's end is no error, what was computed has to be waited for first: with garbage in its weights a rank
    that has no copy couldn't go on.
    """
    t.world.settle()
    if not t.told_ahead:
        leave_word(t, after)
        t.told_ahead = _only_update_left(t)


def _only_update_left(t: Trainer) -> bool:
    """Return whether nothing comes between the gradients and the update that may log, or draw a random number."""
    own = t.overridden
    return not (t.hooks.on_before_optimizer_step or own.optimizer_step or own.configure_gradient_clipping or t.closures)


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
    pulse.set_reached(state["reached"])
    t.torn = False
    t.boundary, t.stage, t.meeting = state["boundary"], state["stage"], state["meeting"]
    t.published.step, t.published.open = state["published"]
    if dealer is None:  # a rank whose sums another has now is as if it had had no batch
        t.logbook.batches = state["batches"] if place is not None or t.world.main_rank else 0
        return
    if came:
        t.strategy.starts(t.state.step)
    dealer.section, dealer.planned = state["dealt"]


def standing(t: Trainer) -> dict[str, Any]:
    """Return what all go on from, but for the weights."""
    dealer = t.strategy.dealer
    return {
        **run_state(t),
        "failures": len(t.failures),
        "reached": pulse.reached(),
        "boundary": t.boundary,
        "stage": t.stage,
        "meeting": t.meeting,
        "batches": t.logbook.batches,
        "published": (t.published.step, t.published.open),
        "dealt": None if dealer is None else (dealer.section, dealer.planned),
    }
