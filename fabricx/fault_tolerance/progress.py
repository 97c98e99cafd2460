"""Per-rank record of progress, from which other ranks can continue; without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fabricx.core.state import EpochStep
from fabricx.session.rank_state import BufferCopies, RankState

if TYPE_CHECKING:
    from fabricx.session.session import Session


class Progress(NamedTuple):
    """Progress of a rank; increases with every collective action.

    Attributes:
        epoch, batch, samples: position in the data.
        meeting: the meeting of asynchronous ranks after the batch is incomplete.
        drained: see `RunState.drained`.
        epoch_step: see `EpochStep`.
        validated: the validation after the batch is complete, or none is due.
        plateau_step: see `RunState.plateau_step`.
        closing: see `RunState.closing`.
        generation: generation of the group; last, because its members have received a state with new metric sums.
    """

    epoch: int
    batch: int
    samples: int
    meeting: bool
    drained: bool
    epoch_step: int
    validated: bool
    plateau_step: int
    closing: bool
    generation: int


def progress(session: Session) -> Progress:
    """Return the progress of this rank.

    Args:
        session: this rank's session.
    """
    state, ft = session.state, session.fault_tolerance
    return Progress(
        state.epoch, state.batch, state.samples, ft.meeting is not None, state.drained, int(ft.epoch_step),
        ft.epoch_step > EpochStep.BATCH_WATCHERS and not state.validating, state.plateau_step, state.closing,
        session.world.generation,
    )  # fmt: skip


def record_of(point: RankState, buffers: BufferCopies | None) -> dict[str, Any]:
    """Return the per-rank state at a point, with the buffers that batches have changed on this rank.

    Args:
        point: state to record.
        buffers: copies of the module's buffers; None if they are not recorded.
    """
    return {**point.record(), "buffers": None if buffers is None else buffers.packed(point)}


def after_publishing(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record from which the next epoch begins: without the values of the epoch, which are published.

    Args:
        record: result of `record_of`.
    """
    objects = {name: states for name, states in record["objects"].items() if name not in record["computed"]}
    return {**record, "sums": {}, "logged": {}, "objects": objects, "computed": []}
