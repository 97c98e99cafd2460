"""Per-rank record of progress, from which other ranks can continue; without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fabricx.checkpoint.content import restore_run, run_state
from fabricx.checkpoint.rank_state import RankState
from fabricx.core.rng import seed_everything
from fabricx.core.state import Stage
from fabricx.distributed import heartbeat
from fabricx.distributed.generations import membership

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

NO_SUMS: Final[dict[str, Any]] = {"sums": {}, "logged": {}}  # in a record: the values of the epoch are published


def progress(trainer: Trainer) -> tuple[Any, ...]:
    """Return the progress of this rank: a tuple that increases with every collective action.

    The last element is the generation, because members of a generation have received a state with new metric sums.

    Args:
        trainer: of this rank.
    """
    state, ft = trainer.state, trainer.fault_tolerance
    return (
        state.epoch, state.batch, state.samples, ft.meeting is not None, state.drained, int(ft.stage),
        ft.stage > Stage.BATCH_TOLD and not state.validating, state.closing, trainer.world.generation,
    )  # fmt: skip


def record_of(trainer: Trainer, point: RankState) -> dict[str, Any]:
    """Return the per-rank state at a point, with the buffers that batches have changed on this rank.

    Args:
        trainer: of this rank.
        point: state to record.
    """
    buffers = trainer.fault_tolerance.buffers
    return {**point.record(), "buffers": None if buffers is None else buffers.packed(point)}


def take_over(trainer: Trainer, state: dict[str, Any], source: int | None, *, came: bool) -> None:
    """Load the state of the most advanced rank, without weights.

    Args:
        trainer: of this rank.
        state: result of `standing`, with the per-rank states of all ranks.
        source: index of this rank's per-rank state; None if the main rank has all metric sums.
        came: this rank is a replacement or newcomer.
    """
    dealer, ft = trainer.strategy.dealer, trainer.fault_tolerance
    if came:
        # A replacement loads the random state of its predecessor below; a newcomer keeps this seed.
        seed_everything((state["state"]["seed"] + membership().worker) % 2**32)
    restore_run(trainer, state, rank=source)
    heartbeat.set_reached(state["reached"])
    trainer.train_logbook.metrics.shared = state["shared"]
    ft.torn = False
    for part, training in zip(trainer.module.modules(), state["modes"], strict=True):
        part.training = training
    if came:  # hooks may have changed `requires_grad` since set-up
        for parameter, trained in zip(trainer.module.parameters(), state["trained"], strict=True):
            parameter.requires_grad_(trained)
    trainer.boundary, ft.stage, ft.meeting = state["boundary"], state["stage"], state["meeting"]
    trainer.published.step, trainer.published.open = state["published"]
    if dealer is None:  # a rank whose metric sums are on the main rank now counts no batches
        trainer.logbook.batches = state["logged_batches"] if source is not None or trainer.world.main_rank else 0
        return
    if came:
        trainer.strategy.starts(trainer.state.step, trainer.state.ranks)
    section = dealer.section
    dealer.take_position(state["dealt"])
    if dealer.section != section:  # this worker has joined later, or missed a section
        dealer.forget_weights()


def standing(trainer: Trainer) -> dict[str, Any]:
    """Return the state of the run that is common to all ranks, without weights.

    Args:
        trainer: of this rank.
    """
    dealer = trainer.strategy.dealer
    return {
        **run_state(trainer),
        "failures": len(trainer.failures),
        "reached": heartbeat.reached(),
        "boundary": trainer.boundary,
        "stage": trainer.fault_tolerance.stage,
        "meeting": trainer.fault_tolerance.meeting,
        "logged_batches": trainer.logbook.batches,
        "shared": trainer.train_logbook.metrics.shared,
        "modes": [part.training for part in trainer.module.modules()],
        "trained": [parameter.requires_grad for parameter in trainer.module.parameters()],
        "published": (trainer.published.step, trainer.published.open),
        "dealt": None if dealer is None else dealer.position(),
    }
