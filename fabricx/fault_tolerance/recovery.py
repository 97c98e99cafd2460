"""In-place recovery: surviving workers continue from the interrupted batch after a worker has died.

Survivors and replacements form the next generation of the process group and continue from the most advanced member.
Ranks are at most one collective apart, and a collective that is complete on any rank contains the contributions of all
ranks, including dead ranks. Survivors keep their weights. A replacement receives the weights from another rank, and
reads per-rank state (RNG, metric sums) from the shared-memory slot of the worker that it replaces.
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
from fabricx.checkpoint.rank_state import RankState, of_word
from fabricx.consistency.shared_settings import share_settings
from fabricx.core.state import Phase
from fabricx.core.steps import wrap_steps
from fabricx.distributed.generations import Generation, membership
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.world import World
from fabricx.errors import ServerLost
from fabricx.fault_tolerance import rank_record
from fabricx.fault_tolerance.progress import NO_SUMS, progress, record_progress, standing, take_over, word_of
from fabricx.fault_tolerance.rollback import go_back
from fabricx.metrics.logger_dispatcher import LoggerDispatcher

if TYPE_CHECKING:
    from fabricx.checkpoint import Writer
    from fabricx.trainer.trainer import Trainer

NOTICE_S: Final = 1.0  # from an error to the supervisor's notice of a death
ANSWER_S: Final = 5.0  # from a report of cut connections to the supervisor's answer
NEWCOMER_S: Final = 600.0  # until the next generation begins
SIGNS: Final = ("onnection closed", "onnection reset", "roken pipe", "ocket")  # in errors of cut connections


Records = list[tuple[Any, dict[str, Any]]]  # per-rank state by progress


@dataclass
class _MemberState:
    """State that a member contributes to the next generation.

    Attributes:
        progress: see `standing.progress`; empty for a replacement.
        records: per-rank state by progress, of this member or of the worker that it replaces.
        now: per-rank state at this moment; None for a replacement.
        empty: (generation, records) of each place without a worker, with the generation since which it is empty.
    """

    progress: tuple[Any, ...] = ()
    records: Records = field(default_factory=list)
    now: dict[str, Any] | None = None
    empty: list[tuple[int, Records]] = field(default_factory=list)

    def at(self, progress: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the per-rank state to continue with at `progress`; None if there is none."""
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


def recover(t: Trainer, error: Exception) -> None:
    """Continue in the next generation.

    Raises:
        Exception: `error`, if no worker has died, or if recovery in place is impossible.
    """
    torn = t.torn and t.memory_checkpointer is None  # in-memory checkpoints restore the state before that update
    if t.strategy.dealer is not None and t.strategy.dealer.holds_leases:
        raise error  # of a batch of this rank: only the end of its process gives its leases to another
    if not membership().changes or torn or t.world.newcomer:
        raise error
    if any(callback.repeats_after(t, error) for callback in t.callbacks):
        traceback.clear_frames(error.__traceback__)  # frees the memory that the frames hold
        membership().say("again", (t.world.generation, f"{type(error).__name__}; all begin the step again"))
    if not _is_membership_change(t.world.generation, error, t.world.silent):
        raise error
    _join_others(t, holds=True)


def take_part(t: Trainer) -> None:
    """Start training: with all ranks at the beginning, or as a replacement in a running job."""
    if t.world.newcomer:
        membership().say("ready")
        _join_others(t, holds=False)
        return
    if t.memory_checkpointer is not None:
        t.memory_checkpointer.begin(t, range(t.world.size))
    if t.strategy.dealer is not None:  # until the servers have the main rank's weights, it can't be replaced
        t.world.barrier()
    record_progress(t)
    membership().say("inside")  # recovery in place is possible from this point


def _is_membership_change(generation: int, error: Exception, silent: bool) -> bool:
    """Return whether an error is caused by a dead worker or by cut connections.

    Args:
        generation: number of the generation at the time of the error.
        error: any kind of error, if `silent`.
        silent: aborted collectives return arbitrary values without an error.
    """
    own = membership()
    if not isinstance(error, (RuntimeError, OSError)) and not silent:
        return False
    if own.becomes_outdated(generation, NOTICE_S):
        return True
    if not isinstance(error, ServerLost) and not any(sign in str(error) for sign in SIGNS):
        return False
    own.say("cut", generation)
    return own.becomes_outdated(generation, ANSWER_S)


def _join_others(t: Trainer, *, holds: bool) -> None:
    """Join generations until all members of one have taken over the same state.

    A worker may die while the members of a generation take over the state; some members have finished then and others
    have not. A member starts to train only after all members have taken over. Until a member is known to train
    (`Generation.settled`), every member contributes the same state again that it contributed first.

    Args:
        t: the trainer.
        holds: this rank was a member before; False for a replacement.
    """
    own = membership()
    writer, given_up = _let_go(t) if holds else None, None
    began, step = time.monotonic(), t.state.step
    number, unchanged, taken_over = t.world.generation, holds, -1
    point = (t.epoch_end or t.rank_state or RankState(t)) if holds and t.memory_checkpointer is None else None
    member, state = (_MemberState() if point is None else _current_state(t, point)), None
    while True:
        generation = own.newer_than(number, NEWCOMER_S)
        if t.memory_checkpointer is not None and unchanged and generation.whole:
            t.memory_checkpointer.before_change(t)
        if 0 <= taken_over <= generation.settled:
            member, state = _current_state(t, RankState(t)), None
        number, unchanged, taken_over = generation.number, False, -1
        try:
            _join(t, generation)
            if writer is not None:  # all members have abandoned the checkpoint that was being written
                given_up = writer.given_up
                writer.sweep()
                writer = None
            if t.memory_checkpointer is not None:
                failures = go_back(t, came=not holds)
            else:
                member, state = _agree(t, generation, member, point, state)
                failures, point, taken_over = state["failures"], None, number
            _go_on(t, generation)
            if member.records and t.slot is not None:  # both records are needed until the generation is settled
                t.slot.write(*member.records[0])
            record_progress(t)  # before the others continue: a replacement of this rank starts from this record
            member.records.append((progress(t), word_of(t, RankState(t))))
            lost = t.world.gather_objects(given_up)
            break
        except Exception as error:
            own.shut()
            if not _is_membership_change(number, error, t.world.silent):
                raise
    own.say("step", (number, t.state.step))
    _report(t, failures, step if holds else t.state.step, time.monotonic() - began)
    _report_lost_checkpoint(t, lost)


def _report(t: Trainer, before: int, reached: int, seconds: float) -> None:
    """Report the failures since the `before` first ones, the repeated steps and the duration, in the log."""
    what = "; ".join(t.failures[before:]) or "others have come"
    workers = f"{t.world.size} workers go on" if t.world.size > 1 else "1 worker goes on"
    again = reached - t.state.step
    lost = f", train {again} step{'s' if again > 1 else ''} again" if again > 0 else ""
    text = f"{what}; {workers} from step {t.state.step}{lost}, after {seconds:.2f} s"
    t.logger_dispatcher.event("recovery", text, t.state.step, steps_again=max(0, again), seconds=seconds)
    t.print(text)


def _report_lost_checkpoint(t: Trainer, abandoned: list[Path | None]) -> None:
    """Report the user's checkpoint that was abandoned because a worker died, if there is one."""
    if path := next((path for path in abandoned if path is not None), None):
        text = (
            f"the checkpoint {path} was lost: it was being written when the workers changed, and is not there unless a "
            "hook saves it again"
        )
        t.logger_dispatcher.event("checkpoint", text, t.state.step)
        t.print(text)


def _let_go(t: Trainer) -> Writer | None:
    """Abandon the interrupted batch; returns the writer of an abandoned checkpoint."""
    membership().shut()
    if t.agreement is not None:
        t.agreement.close()
    writer, t.writer = t.writer, None
    if writer is not None:
        writer.abandon()
    if (dealer := t.strategy.dealer) is not None:  # other workers finish their section first
        dealer.let_all_meet()
    t.logbook = t.train_logbook
    t.logbook.end_batch()
    t.attach_log(t.logbook)
    t.state.phase = Phase.TRAIN
    return writer


def _join(t: Trainer, generation: Generation) -> None:
    """Build the process group of a generation, with all members."""
    own, world = membership(), t.world
    if own.worker not in generation.workers:
        own.leave()
    rank, size = generation.workers.index(own.worker), len(generation.workers)
    joined = replace(
        world, rank=rank, size=size, local_rank=rank, local_size=size, generation=generation.number,
        newcomer=False,
    )  # fmt: skip  # all are on one machine
    _wait_for_all(joined, generation)
    joined.follow()
    t.world = joined
    if t.strategy.dealer is not None:
        t.strategy.dealer.workers = generation.workers
    t.strategy.world_changed(joined)
    wrap_steps(t)
    t.training_step = t.strategy.wrap_step(t.training_step)
    world.forget_left()


def _wait_for_all(world: World, generation: Generation) -> None:
    """Wait for all members. Unlike the rendezvous of the group, the wait ends when a member dies."""
    store = world.store
    assert store is not None
    store.set(world.key(f"here/{generation.number}/{membership().worker}"), "")
    keys = [world.key(f"here/{generation.number}/{worker}") for worker in generation.workers]
    while not store.check(keys):
        membership().check(generation.number)
        time.sleep(0.002)


def _current_state(t: Trainer, point: RankState) -> _MemberState:
    """Return the contribution of a rank that was a member before."""
    now = word_of(t, RankState(t))
    if t.epoch_end is not None:  # other ranks may have finished this epoch
        now |= NO_SUMS
    return _MemberState(progress(t), [(progress(t), word_of(t, point))], now)


def _agree(
    t: Trainer, generation: Generation, member: _MemberState, point: RankState | None,
    before: dict[str, Any] | None,
) -> tuple[_MemberState, dict[str, Any]]:  # fmt: skip
    """Bring all members to the state of the most advanced member. Nothing changes before all data is received.

    Args:
        t: the trainer.
        generation: the generation that agrees.
        member: contribution of this rank.
        point: start of the interrupted batch, if any.
        before: state that this rank took over in an earlier generation that was not settled, if any.

    Returns:
        the contribution and the state for the next attempt, in case this generation is not settled either.
    """
    world, members = t.world, _gather(t, generation, member)
    furthest = max(other.progress for other in members)
    if not furthest:
        raise RuntimeError("no member of the group knows how far the run is")
    holder = [other.progress for other in members].index(furthest)
    state = world.broadcast_object((before or standing(t)) if world.rank == holder else None, holder)
    record = members[world.rank].at(furthest)
    if t.strategy.dealer is None:
        behind = any(other.progress != furthest for other in members)
        weights: Any = _broadcast_weights(t, point, holder) if behind else None
        records, whole = _records_of_all(members, furthest)
        rank = world.rank if whole else None
        if member.progress != furthest:
            t.strategy.load_state_dict(weights, t.module, t.optimizers)
        elif point is not None and point.of_window:
            point.put_back_buffers(t.module)
    else:  # the servers have the weights, and each worker keeps its own sums
        records = [] if record is None else [record]
        rank = 0 if records else None
    take_over(t, {**state, "ranks": [of_word(one) for one in records]}, rank, came=not member.progress)
    return _MemberState(furthest, [] if record is None else [(furthest, record)]), state


def _gather(t: Trainer, generation: Generation, member: _MemberState) -> list[_MemberState]:
    """Return the contributions of all members, by rank; a replacement contributes records of its predecessors."""
    own = membership()
    records, empty = member.records, []
    if not member.progress:
        records = _read_slots(own.folder, generation.heirs.get(own.worker, ()))
    if t.world.main_rank:
        empty = [(since, _read_slots(own.folder, workers)) for since, workers in generation.gone]
    return t.world.gather_objects(replace(member, records=records, empty=empty))


def _read_slots(folder: str, workers: Iterable[int]) -> Records:
    return [entry for worker in workers for entry in rank_record.read(folder, worker)]


def _records_of_all(members: list[_MemberState], furthest: tuple[Any, ...]) -> tuple[list[dict[str, Any]], bool]:
    """Return the per-rank states, and whether every rank has its own; otherwise the main rank takes all sums."""
    present = [member.at(furthest) for member in members]
    empty = [records for member in members for since, records in member.empty if since > furthest[-1]]
    absent = [_record_at(records, furthest) for records in empty]
    whole = not empty and all(record is not None for record in present)
    return [record for record in (*present, *absent) if record is not None], whole


def _broadcast_weights(t: Trainer, point: RankState | None, holder: int) -> Any:
    """Return the weights and the optimizer states of rank `holder`, on all ranks."""
    world = t.world
    mine: tuple[Any, dict[str, Tensor]] = (None, {})
    if world.rank == holder:
        state = t.strategy.state_dict(t.module, t.optimizers)
        state["module"].update(point.buffers if point is not None else {})
        mine = tree.split(state)
    rest, kinds = world.broadcast_object((mine[0], {k: (v.shape, v.dtype) for k, v in mine[1].items()}), holder)
    tensors = {}
    for name, (shape, dtype) in kinds.items():
        own = mine[1].get(name)
        tensor = torch.empty(shape, dtype=dtype, device=world.device) if own is None else own.to(world.device)
        tensors[name] = world.broadcast(tensor, holder)
    return tree.join(rest, tensors)


def _go_on(t: Trainer, generation: Generation) -> None:
    """Connect all parts that communicate to the new process group."""
    world = t.world
    t.train_logbook.metrics.world_changed(world.gather_objects, world.size)
    t.train_logbook.metrics.counts_shared = world.main_rank
    reason = None
    if t.agreement is not None:
        reason = t.agreement.reason
        t.agreement.close()
    t.agreement = Agreement(world)
    if reason is not None:
        t.agreement.request(reason)
    share_settings(t)
    t.failures = list(generation.failures)
    t.rank_state = t.epoch_end = None
    t.balance.changes.clear()
    t.recorder.became(world.rank, world.size, generation.number)
    t.recorder.begin()
    if world.main_rank and not t.logger_dispatcher and t.writes:
        t.logger_dispatcher = LoggerDispatcher(t.loggers, t.run_dir, t.recorder)
        t.logger_dispatcher.rewind(t.state.step)
    if t.memory_checkpointer is not None:
        t.logger_dispatcher.rewind(t.state.step)
        t.memory_checkpointer.begin(t, generation.workers)
