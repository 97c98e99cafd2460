"""Fault tolerance of a rank: recovery from the loss of another rank, and the selection of the records for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from fabricx.core.callback import recovery_policy_of
from fabricx.distributed.membership.generations import WorkerMessage, membership
from fabricx.fault_tolerance.in_place import recover, take_part
from fabricx.fault_tolerance.memory_checkpointer import MemoryCheckpointer
from fabricx.fault_tolerance.rank_record import Slot
from fabricx.fault_tolerance.records import RankRecords, tracked_attributes
from fabricx.fault_tolerance.rollback import restore_newest
from fabricx.session.fault_tolerance import FaultTolerance

if TYPE_CHECKING:
    from fabricx.session.session import Session


@final
class Recovery(RankRecords):
    """Records the state that other ranks need if this rank dies, and continues after a peer has died."""

    def restore(self) -> bool:
        return self.memory is not None and self.members is None and restore_newest(self._session, self)

    def join_run(self) -> None:
        take_part(self._session, self)

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Suppress an error of the block if a peer was lost; training can then continue from the newest state.

        Raises:
            Exception: the error of the block, if no rank was lost or if recovery in place is impossible.
        """
        try:
            yield
        except Exception as error:
            batch = self._session.batch
            batch.in_step = batch.asynchronous = False
            batch.idle_ranks = 0
            recover(self._session, self, error)


def set_up(session: Session) -> FaultTolerance:
    """Return the fault tolerance of a run: as much as the supervisor and the strategy support.

    If replicas of the weights exist and lost workers are replaced, records of progress suffice. For unreplicated state,
    or if all processes are restarted, in-memory checkpoints are needed.

    Ranks at their own pace that read streams are not recovered in place: which batches of a lost rank's stream are in
    the weights is unknown. All processes then restart from a snapshot, which has the position of each rank. In
    lockstep a replacement reads the stream of the lost rank; without a replacement, no rank would read it.

    Args:
        session: this rank's session, with world, strategy and data set up.
    """
    member, strategy, policy = membership(), session.strategy, recovery_policy_of(session.callbacks)
    members, lockstep = member if member.changes else None, strategy.traits.lockstep
    if not member.folder and members is None:
        # attributes of snapshots, from which all processes start again
        attributes = tracked_attributes(session) if policy is not None and lockstep else None
        return FaultTolerance(session.module, session.strategy, session.state, session.rank_state, attributes)
    feed, source = session.data.train_feed, type(session.data.train_dataloader)
    if not session.world.newcomer:  # a newcomer joins workers that have decided this, or is dismissed by them
        recovers = lockstep or feed.exact_position
        if feed.of_rank or not recovers:
            member.send(WorkerMessage.SIZE_FIXED, (f"each worker reads its own data from {source.__name__}", recovers))
        if not recovers:
            return session.fault_tolerance
    if not lockstep:  # servers have the state
        return Recovery(session, members)
    if member.folder and not (members is not None and strategy.traits.replicated):
        every = None if policy is None else policy.copy_every_n_steps
        return Recovery(session, members, memory=MemoryCheckpointer(session.world, strategy.traits.replicas_of, every))
    return Recovery(session, members, Slot(member.folder, member.worker) if members is not None else None)
