"""In-place recovery: surviving workers continue from the interrupted batch after a worker has died.

Survivors and replacements form the next generation of the process group and continue from the most advanced member.
Ranks differ by at most a single collective, and a collective that is complete on any rank contains the contributions
of all ranks, including dead ranks. Survivors keep their weights. A replacement receives the weights from a survivor,
and reads per-rank state (RNG, metric sums) from the shared-memory slot of the worker that it replaces.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricx.checkpoint import tree
from fabricx.core.state import Phase
from fabricx.distributed.generations import Generation, membership
from fabricx.distributed.lost_peers import may_be_cut
from fabricx.distributed.world import World
from fabricx.fault_tolerance import rank_record
from fabricx.fault_tolerance.common_state import common_state, load_common_state
from fabricx.fault_tolerance.progress import NO_SUMS, progress, record_of
from fabricx.fault_tolerance.rollback import roll_back
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.session.rank_state import RankState, from_record

if TYPE_CHECKING:
    from fabricx.checkpoint import Writer
    from fabricx.fault_tolerance.records import RankRecords
    from fabricx.session.session import Session

NOTICE_S: Final = 1.0  # from an error to the supervisor's notice of a death
ANSWER_S: Final = 5.0  # from a report of cut connections to the supervisor's answer
NEWCOMER_S: Final = 600.0  # until the next generation begins


Records = list[tuple[Any, dict[str, Any]]]  # per-rank state by progress


@dataclass
class _MemberState:
    """State that a member contributes to the next generation.

    Attributes:
        progress: see `fault_tolerance.progress.progress`; empty for a replacement.
        records: per-rank state by progress, of this member or of the worker that it replaces.
        now: per-rank state at the time of the contribution; None for a replacement.
        empty: (generation, records) of each rank without a worker, with the generation since which it is vacant.
    """

    progress: tuple[Any, ...] = ()
    records: Records = field(default_factory=list)
    now: dict[str, Any] | None = None
    empty: list[tuple[int, Records]] = field(default_factory=list)

    def at(self, progress: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the per-rank state to continue with at `progress`; None without a matching record.

        Args:
            progress: progress of the most advanced member.
        """
        return _record_at(self.records, progress, self.now)


def _record_at(
    records: Records, progress: tuple[Any, ...], now: dict[str, Any] | None = None
) -> dict[str, Any] | None:  # fmt: skip
    """Return the record of `progress`, else `now`, else the newest earlier record.

    Records of earlier generations are skipped: the sums of the present generation include them.
    """
    exact = next((record for key, record in records if key == progress), None)
    if exact or now:
        return exact or now
    earlier = [(key, record) for key, record in records if key <= progress and key[-1] == progress[-1]]
    return max(earlier, key=lambda entry: entry[0])[1] if earlier else None


def recover(session: Session, ft: RankRecords, error: Exception) -> None:
    """Continue in the next generation of the process group, after an error caused by the death of a worker.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        error: this rank's error.

    Raises:
        Exception: `error`, if no worker has died, or if recovery in place is impossible.
    """
    torn = ft.torn and ft.memory is None  # in-memory checkpoints restore the state before that update
    if session.dealer.within_section:  # an error of this rank alone: it would train the section's batches again
        raise error  # its leases are released when its process ends
    if not membership().changes or torn or session.world.newcomer:
        raise error
    if any(callback.repeats_after(session.trainer, error) for callback in session.callbacks):
        traceback.clear_frames(error.__traceback__)  # frees the memory that the frames hold
        membership().send("again", (session.world.generation, f"{type(error).__name__}; all ranks repeat the step"))
    if not _is_membership_change(session.world.generation, error, session.world.silent):
        raise error
    _join_others(session, ft, holds=True)


def take_part(session: Session, ft: RankRecords) -> None:
    """Start training: with all ranks at the beginning, or as a replacement in a running job.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
    """
    if session.world.newcomer:
        membership().send("ready")
        _join_others(session, ft, holds=False)
        return
    if ft.memory is not None:
        ft.memory.begin(session, range(session.world.size))
    if not session.strategy.traits.lockstep:  # the main rank can't be replaced before the servers have its weights
        session.world.barrier()
    ft.record()
    membership().send("inside")  # recovery in place is possible from this point


def _is_membership_change(generation: int, error: Exception, silent: bool) -> bool:
    """Return whether an error is caused by a dead worker or by cut connections.

    Args:
        generation: number of the generation at the time of the error.
        error: any kind of error, if `silent`.
        silent: aborted collectives return arbitrary values without an error.
    """
    group_member = membership()
    if not isinstance(error, (RuntimeError, OSError)) and not silent:
        return False
    if group_member.becomes_outdated(generation, NOTICE_S):
        return True
    if not may_be_cut(error):
        return False
    group_member.send("cut", generation)
    return group_member.becomes_outdated(generation, ANSWER_S)


def _join_others(session: Session, ft: RankRecords, *, holds: bool) -> None:
    """Join generations until all members of a generation have loaded the same state.

    A worker may die while the members of a generation load the state, when only some members have finished. A member
    starts to train only after all members have loaded the state. Until the supervisor has received that a member
    trains (`Generation.settled`), every member contributes the same state again that it contributed first.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        holds: this rank was a member before; False for a replacement.
    """
    group_member = membership()
    writer, given_up = _abandon_batch(session) if holds else None, None
    began, step = time.monotonic(), session.state.step
    number = session.world.generation  # newest generation that this rank has tried to join
    unchanged = holds  # no generation was tried since the interrupted batch
    loaded = -1  # generation in which this rank has loaded the members' state; -1 for none
    point = (ft.epoch_end or ft.resume_point or session.rank_state()) if holds and ft.memory is None else None
    member, state = (_MemberState() if point is None else _current_state(session, ft, point)), None
    while True:
        generation = group_member.newer_than(number, NEWCOMER_S)
        if ft.memory is not None and unchanged and generation.whole:
            ft.memory.before_change(session, torn=ft.torn)
        if 0 <= loaded <= generation.settled:  # a member trains with this state: contribute the present state
            member, state = _current_state(session, ft, session.rank_state()), None
        number, unchanged, loaded = generation.number, False, -1
        try:
            _join(session, generation)
            if writer is not None:  # all members have abandoned the checkpoint that was being written
                given_up = writer.given_up
                writer.sweep()
                writer = None
            if ft.memory is not None:
                failures = roll_back(session, ft, newcomer=not holds)
            else:
                member, state = _load_most_advanced(session, ft, generation, member, point, state)
                failures, point, loaded = state["failures"], None, number
            _connect(session, ft, generation)
            if member.records and ft.slot is not None:  # both records are needed until the generation is settled
                ft.slot.write(*member.records[0])
            ft.record()  # before the other ranks continue: a replacement of this rank starts from this record
            member.records.append((progress(session), record_of(session, session.rank_state())))
            lost = session.world.gather_objects(given_up)
            break
        except Exception as error:
            group_member.shut()
            if not _is_membership_change(number, error, session.world.silent):
                raise
    group_member.send("step", (number, session.state.step))
    _report(session, failures, step if holds else session.state.step, time.monotonic() - began)
    _report_lost_checkpoint(session, lost)


def _report(session: Session, before: int, reached: int, seconds: float) -> None:
    """Report failures after the first `before`, the repeated steps and the duration, in the log."""
    what = "; ".join(session.failures.errors[before:]) or "the workers have changed"
    workers = f"{session.world.size} workers continue" if session.world.size > 1 else "1 worker continues"
    again = reached - session.state.step
    lost = f", train {again} step{'s' if again > 1 else ''} again" if again > 0 else ""
    text = f"{what}; {workers} from step {session.state.step}{lost}, after {seconds:.2f} s"
    session.metrics.loggers.event("recovery", text, session.state.step, steps_again=max(0, again), seconds=seconds)
    session.print(text)


def _report_lost_checkpoint(session: Session, abandoned: list[Path | None]) -> None:
    """Report the user's checkpoint that was abandoned because a worker died, if any."""
    if path := next((path for path in abandoned if path is not None), None):
        text = (
            f"the checkpoint {path} was lost: it was being written when the workers changed, and is missing unless a "
            "hook saves it again"
        )
        session.metrics.loggers.event("checkpoint", text, session.state.step)
        session.print(text)


def _abandon_batch(session: Session) -> Writer | None:
    """Abandon the interrupted batch; returns the writer of an abandoned checkpoint."""
    membership().shut()
    membership().send("left", session.world.generation)
    session.agreement.close()
    writer, session.checkpoints.writer = session.checkpoints.writer, None
    if writer is not None:
        writer.abandon()
    session.dealer.let_all_meet()  # other workers finish their section first
    session.metrics.discard_batch()
    session.state.phase = Phase.TRAIN
    return writer


def _join(session: Session, generation: Generation) -> None:
    """Build the process group of a generation, with all members."""
    group_member, world = membership(), session.world
    if group_member.worker not in generation.workers:
        group_member.leave()
    rank, size = generation.workers.index(group_member.worker), len(generation.workers)
    joined = replace(
        world, rank=rank, size=size, local_rank=rank, local_size=size, generation=generation.number,
        newcomer=False,
    )  # fmt: skip  # all ranks are on the same machine
    _wait_for_all(joined, generation)
    joined.follow()
    session.dealer.workers = generation.workers
    session.change_world(joined)
    world.release_left_groups()


def _wait_for_all(world: World, generation: Generation) -> None:
    """Wait for all members. Unlike the rendezvous of the group, the wait ends when a member dies."""
    store = world.store
    assert store is not None
    store.set(world.key(f"here/{generation.number}/{membership().worker}"), "")
    keys = [world.key(f"here/{generation.number}/{worker}") for worker in generation.workers]
    while not store.check(keys):
        membership().check(generation.number)
        time.sleep(0.002)


def _current_state(session: Session, ft: RankRecords, point: RankState) -> _MemberState:
    """Return the contribution of a rank that was a member before."""
    now = record_of(session, session.rank_state())
    if ft.epoch_end is not None:  # other ranks may have finished this epoch
        now |= NO_SUMS
    return _MemberState(progress(session), [(progress(session), record_of(session, point))], now)


def _load_most_advanced(
    session: Session, ft: RankRecords, generation: Generation, member: _MemberState, point: RankState | None,
    before: dict[str, Any] | None,
) -> tuple[_MemberState, dict[str, Any]]:  # fmt: skip
    """Load the state of the most advanced member on all members. Nothing changes before all data is received.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        generation: the generation that agrees.
        member: contribution of this rank.
        point: start of the interrupted batch, if any.
        before: state that this rank loaded in an earlier generation that was not settled, if any.

    Returns:
        the contribution and the state for the next attempt, in case this generation is not settled either.
    """
    world, members = session.world, _gather(session, generation, member)
    furthest = max(other.progress for other in members)
    if not furthest:
        raise RuntimeError("no member of the process group has the state of the run; resume from a checkpoint on disk")
    holder = [other.progress for other in members].index(furthest)
    state = world.broadcast_object((before or common_state(session)) if world.rank == holder else None, holder)
    record = members[world.rank].at(furthest)
    if session.strategy.traits.lockstep:
        behind = any(other.progress != furthest for other in members)
        weights: Any = _broadcast_weights(session, point, holder) if behind else None
        records, whole = _records_of_all(members, furthest)
        rank = world.rank if whole else None
        if member.progress != furthest:
            session.strategy.load_state_dict(weights, session.module, session.optimizers)
        elif point is not None and point.of_window:
            point.restore_buffers(session.module)
    else:  # the servers have the weights, and each worker keeps its metric sums
        records = [] if record is None else [record]
        rank = 0 if records else None
    states = [from_record(per_rank) for per_rank in records]
    ft.torn = False
    load_common_state(session, {**state, "ranks": states}, rank, newcomer=not member.progress)
    return _MemberState(furthest, [] if record is None else [(furthest, record)]), state


def _gather(session: Session, generation: Generation, member: _MemberState) -> list[_MemberState]:
    """Return the contributions of all members, by rank; a replacement contributes the records of its predecessors."""
    folder, worker = membership().folder, membership().worker
    records, empty = member.records, []
    if not member.progress:
        records = _read_slots(folder, generation.replacements.get(worker, ()))
    if session.world.main_rank:
        empty = [(since, _read_slots(folder, workers)) for since, workers in generation.departed]
    return session.world.gather_objects(replace(member, records=records, empty=empty))


def _read_slots(folder: str, workers: Iterable[int]) -> Records:
    return [entry for worker in workers for entry in rank_record.read(folder, worker)]


def _records_of_all(members: list[_MemberState], furthest: tuple[Any, ...]) -> tuple[list[dict[str, Any]], bool]:
    """Return the per-rank states, and whether each belongs to a rank; otherwise the main rank receives all sums."""
    present = [member.at(furthest) for member in members]
    empty = [records for member in members for since, records in member.empty if since > furthest[-1]]
    absent = [_record_at(records, furthest) for records in empty]
    whole = not empty and all(record is not None for record in present)
    return [record for record in (*present, *absent) if record is not None], whole


def _broadcast_weights(session: Session, point: RankState | None, holder: int) -> Any:
    """Return the weights and the optimizer states of rank `holder`, on all ranks."""
    world = session.world
    held: tuple[Any, dict[str, Tensor]] = (None, {})  # plain data and tensors of the holder
    if world.rank == holder:
        state = session.strategy.state_dict(session.module, session.optimizers)
        state["module"].update(point.buffers if point is not None else {})
        held = tree.split(state)
    rest, kinds = world.broadcast_object((held[0], {k: (v.shape, v.dtype) for k, v in held[1].items()}), holder)
    tensors = {}
    for name, (shape, dtype) in kinds.items():
        source = held[1].get(name)
        tensor = torch.empty(shape, dtype=dtype, device=world.device) if source is None else source.to(world.device)
        tensors[name] = world.broadcast(tensor, holder)
    return tree.join(rest, tensors)


def _connect(session: Session, ft: RankRecords, generation: Generation) -> None:
    """Connect all parts that communicate to the new process group."""
    world = session.world
    session.metrics.world_changed(world)
    session.renew_agreements()
    session.failures.errors = list(generation.failures)
    ft.resume_point = ft.epoch_end = None
    session.balance.changes.clear()
    session.recorder.became(world.rank, world.size, generation.number)
    session.recorder.begin()
    if world.main_rank and not session.metrics.loggers and session.writes:
        session.metrics.loggers = LoggerDispatcher(session.loggers, session.run_dir, session.recorder)
        session.metrics.loggers.rewind(session.state.step)
    if ft.memory is not None:
        session.metrics.loggers.rewind(session.state.step)
        ft.memory.begin(session, generation.workers)
