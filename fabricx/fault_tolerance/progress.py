"""Per-rank record of progress, from which other ranks can continue; without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fabricx.core.state import Stage
from fabricx.session.rank_state import RankState

if TYPE_CHECKING:
    from fabricx.session.session import Session

NO_SUMS: Final[dict[str, Any]] = {"sums": {}, "logged": {}}  # in a record: the values of the epoch are published


def progress(session: Session) -> tuple[Any, ...]:
    """Return the progress of this rank: a tuple that increases with every collective action.

    The last element is the generation, because members of a generation have received a state with new metric sums.

    Args:
        session: of this rank.
    """
    state, ft = session.state, session.fault_tolerance
    return (
        state.epoch, state.batch, state.samples, ft.meeting is not None, state.drained, int(ft.stage),
        ft.stage > Stage.BATCH_WATCHERS and not state.validating, state.plateau_step, state.closing,
        session.world.generation,
    )  # fmt: skip


def record_of(session: Session, point: RankState) -> dict[str, Any]:
    """Return the per-rank state at a point, with the buffers that batches have changed on this rank.

    Args:
        session: of this rank.
        point: state to record.
    """
    buffers = session.fault_tolerance.buffers
    return {**point.record(), "buffers": None if buffers is None else buffers.packed(point)}
