"""State of a run that is common to all ranks, without weights: recoveries continue from that of the furthest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricx.consistency.comparison import LIMITS
from fabricx.core.module_state.rng import seed_generators
from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.generations import membership
from fabricx.fault_tolerance.hook_entries import load_hook_entries, report_failed_hooks
from fabricx.session.checkpoint import restore_run
from fabricx.session.saving import run_state

if TYPE_CHECKING:
    from fabricx.session.session import Session


def common_state(session: Session) -> dict[str, Any]:
    """Return the state of the run that is common to all ranks, without weights.

    Args:
        session: this rank's session.
    """
    return {
        **run_state(session),
        "failures": len(session.failures.errors),
        "reached": heartbeat.reached(),
        "boundary": session.stop.boundary,
        "stop": session.stop.reason if session.stop.agreed else "",
        "epoch_step": session.fault_tolerance.epoch_step,
        "meeting": session.fault_tolerance.meeting,
        "logged_batches": session.metrics.logbook.batches,
        "shared": session.metrics.training.metrics.shared,
        "limits": {name: getattr(session.options, name) for name in LIMITS},
        "modes": [part.training for part in session.module.modules()],
        "published": (session.metrics.published.step, session.metrics.published.open),
        "evaluated": sorted(session.metrics.training.evaluated),
        "dealt": session.dealer.position(),
    }


def load_common_state(
    session: Session, state: dict[str, Any], source: int | None, *, newcomer: bool, behind: bool,
    goes_back: bool = False,
) -> None:  # fmt: skip
    """Load the state of the most advanced rank, without weights.

    Args:
        session: this rank's session.
        state: result of `common_state`, with the per-rank states of all ranks, and `hook_entries`.
        source: index of this rank's per-rank state; None if the main rank has all metric sums.
        newcomer: this rank is a replacement or newcomer.
        behind: this rank has not reached the state yet.
        goes_back: survivors return to an earlier state, too.
    """
    dealer, ft = session.dealer, session.fault_tolerance
    if newcomer:
        # A replacement loads the random state of its predecessor below; a newcomer keeps this seed.
        seed_generators((state["state"]["seed"] + membership().worker) % 2**32)
    if goes_back:  # callbacks decide by these values, and a replacement lacks later values
        session.metrics.published.metrics, session.metrics.published.logged = {}, {}
    report_failed_hooks(session, state["hook_entries"])
    if newcomer or goes_back:  # hooks may have changed them since set-up
        for name, value in state["limits"].items():
            setattr(session.options, name, value)
        session.options.accumulate_grad_batches = state["accumulate"]
    hooked = (behind or goes_back) and load_hook_entries(session, state, state["hook_entries"])
    restore_run(session, state, rank=source, hooked=hooked and newcomer)
    if session.user_steps.kept is not None:
        session.user_steps.kept.begin_again()
    heartbeat.set_reached(state["reached"])
    session.metrics.training.metrics.shared = state["shared"]
    for part, training in zip(session.module.modules(), state["modes"], strict=True):
        part.training = training
    if state["stop"]:
        session.stop.agree(state["stop"])
    elif goes_back:  # the hooks that have requested a stop since then run again
        session.withdraw_stop()
    session.stop.boundary, ft.epoch_step, ft.meeting = state["boundary"], state["epoch_step"], state["meeting"]
    session.metrics.published.step, session.metrics.published.open = state["published"]
    session.metrics.training.evaluated = set(state["evaluated"])
    if session.strategy.traits.lockstep:
        if source is None:  # a rank whose metric sums are on the main rank now counts no batches
            session.metrics.logbook.batches = state["logged_batches"] if session.world.main_rank else 0
        return
    if newcomer:
        session.serving.on_train_start(session.state.step, session.state.ranks)
    section = dealer.section
    dealer.take_position(state["dealt"])
    if dealer.section != section:  # this worker has joined later, or missed a section
        dealer.forget_weights()
