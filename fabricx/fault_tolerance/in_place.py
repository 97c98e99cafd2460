"""In-place recovery: surviving workers continue from the interrupted batch after a worker has died.

Survivors and replacements form the next generation of the process group and continue from the most advanced member.
Ranks differ by at most a single collective, and a collective that is complete on any rank contains the contributions
of all ranks, including dead ranks. Survivors keep their weights. A replacement receives the weights from a survivor,
and reads per-rank state (RNG, metric sums) from the shared-memory slot of the worker that it replaces.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fabricx.core.state import Phase
from fabricx.distributed.membership.generations import Generation, WorkerMessage, membership
from fabricx.distributed.membership.lost_peers import is_peer_lost, may_be_cut
from fabricx.distributed.world import World
from fabricx.fault_tolerance.member_states import MemberStates
from fabricx.fault_tolerance.rollback import Rollback
from fabricx.metrics.logger_dispatcher import LoggerDispatcher

if TYPE_CHECKING:
    from fabricx.checkpoint import Writer
    from fabricx.fault_tolerance.records import RankRecords
    from fabricx.session.session import Session

NOTICE_S: Final = 1.0  # from an error to the supervisor's notice of a death
ANSWER_S: Final = 5.0  # from a report of cut connections to the supervisor's answer
_SHOWN: Final = 120  # characters of the error of a cut connection

_TOO_LARGE: Final = (
    "attributes that are too large, or of types that are not recovered: {names}. A replacement has their initial "
    "values: save them in on_save_checkpoint, and restore them in on_load_checkpoint"
)
_INITIAL: Final = (
    "workers at their own pace do not recover attributes that training changes: {names}. A replacement begins with "
    "their initial values: save them in on_save_checkpoint, and restore them in on_load_checkpoint, which receives "
    "those of another worker"
)
_WITHOUT_HOOK: Final = (
    "attributes that differ between the ranks: {names}. Those of the rank that failed lack the changes of the "
    "hooks after its last update, such as on_train_batch_end: change them in training_step"
)
_OF_ANOTHER_RANK: Final = (
    "attributes with the values of another rank, because a rank has died in a hook such as on_train_batch_end: "
    "{names}. A sum or a list of a rank's own batches would be wrong: change it in training_step"
)


class _Joined(NamedTuple):
    """What a member reports after it has loaded the state of a generation.

    Attributes:
        newcomer: it was no member before.
        step: weight updates before the failure.
        lost_checkpoint: the user's checkpoint that it has abandoned.
        lost: names of attributes that recovery does not restore.
        changed: names of all changed attributes, if workers at their own pace do not restore them.
    """

    newcomer: bool
    step: int
    lost_checkpoint: Path | None
    lost: set[str]
    changed: set[str]


def recover(session: Session, ft: RankRecords, error: Exception) -> None:
    """Continue in the next generation of the process group, after an error caused by the death of a worker.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        error: this rank's error.

    Raises:
        Exception: `error`, if no worker has died, or if recovery in place is impossible.
    """
    if session.dealer.within_section:  # an error of this rank alone: it would train the section's batches again
        raise error  # its leases are released when its process ends
    for callback in session.callbacks:
        callback.restore_weights()
    changed = ft.weights is not None and ft.weights.changed()
    torn = (ft.torn or changed) and ft.memory is None  # in-memory checkpoints restore the state before that update
    if not membership().changes or torn or session.world.newcomer:
        raise error
    if any(callback.repeats_after(session.trainer, error) for callback in session.callbacks):
        traceback.clear_frames(error.__traceback__)  # frees the memory that the frames hold
        membership().send(
            WorkerMessage.REPEAT, (session.world.generation, f"{type(error).__name__}; all ranks repeat the step")
        )
    if not _is_membership_change(session.world.generation, error, session.world.silent):
        raise error
    _join_next_generation(session, ft, survivor=True)


def take_part(session: Session, ft: RankRecords) -> None:
    """Start training: with all ranks at the beginning, or as a replacement in a running job.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
    """
    if session.world.newcomer:
        membership().send(WorkerMessage.READY)
        _join_next_generation(session, ft, survivor=False)
        return
    if ft.memory is not None:
        ft.memory.begin(session, range(session.world.size))
    if not session.strategy.traits.lockstep:  # the main rank can't be replaced before the servers have its weights
        session.world.barrier()
    ft.record()
    membership().send(WorkerMessage.CAN_RECOVER)  # recovery in place is possible from this point


def _is_membership_change(generation: int, error: Exception, silent: bool) -> bool:
    """Return whether an error is caused by a dead worker or by cut connections.

    Args:
        generation: number of the generation at the time of the error.
        error: any kind of error, if `silent`; the code of a user may have wrapped the error of a collective.
        silent: aborted collectives return arbitrary values without an error.
    """
    group_member = membership()
    if not isinstance(error, (RuntimeError, OSError)) and not is_peer_lost(error) and not silent:
        return False
    if group_member.becomes_outdated(generation, NOTICE_S):
        return True
    if not may_be_cut(error):
        return False
    text = re.sub(r"\[/[^]]*\] ?", "", (str(error).splitlines() or [""])[0])  # without the name of gloo's file
    group_member.send(WorkerMessage.LINKS_CUT, (generation, f"{type(error).__name__}: {text[:_SHOWN]}"))
    return group_member.becomes_outdated(generation, ANSWER_S)


def _join_next_generation(session: Session, ft: RankRecords, *, survivor: bool) -> None:
    """Join the next generation, or a later one if members die meanwhile, and continue with its state.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        survivor: this rank was a member before; False for a replacement.
    """
    writer = _abandon_batch(session) if survivor else None
    lost_checkpoint = None
    began, step_before = time.monotonic(), session.state.step
    number = session.world.generation  # newest generation that this rank has tried to join
    state = (MemberStates if ft.memory is None else Rollback)(session, ft, survivor=survivor)
    while True:
        generation = membership().newer_than(number)
        number = generation.number
        state.prepare(generation)
        try:
            _join(session, generation)
            if writer is not None:  # all members have abandoned the checkpoint that was being written
                lost_checkpoint = writer.given_up
                writer.sweep()
                writer = None
            failures = state.load(generation)
            _connect(session, ft, generation)
            state.record()
            report = _joined(session, ft, lost_checkpoint, step_before if survivor else None)
            members = session.world.gather_objects(report)
            break
        except Exception as error:
            membership().shut()
            if not _is_membership_change(number, error, session.world.silent):
                raise
    ft.reached = max(member.step for member in members)
    membership().send(WorkerMessage.STEP, (number, ft.reached))
    _report(session, failures, step_before if survivor else session.state.step, time.monotonic() - began)
    _report_lost_checkpoint(session, [member.lost_checkpoint for member in members])
    _report_attributes(session, members, state.incomplete)


def _joined(session: Session, ft: RankRecords, lost_checkpoint: Path | None, before: int | None) -> _Joined:
    """Return the report of this rank; `before` is its step before the failure, or None for a newcomer."""
    step, attributes = session.state.step if before is None else before, ft.attributes
    if attributes is None:
        return _Joined(before is None, step, lost_checkpoint, set(), set())
    if session.strategy.traits.lockstep:
        return _Joined(before is None, step, lost_checkpoint, attributes.lost, set())
    return _Joined(before is None, step, lost_checkpoint, set(), attributes.names())


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


def _report_attributes(session: Session, members: list[_Joined], changed_by_hooks: Mapping[str, bool]) -> None:
    """Report attributes that the recovery has not restored exactly, once for the same attributes.

    Args:
        session: this rank's session.
        members: reports of all ranks.
        changed_by_hooks: see `MemberStates.incomplete`.
    """
    newcomers = [member.changed for member in members if member.newcomer]
    changed = set[str]().union(*(member.changed for member in members))
    reported = {
        _TOO_LARGE: set[str]().union(*(member.lost for member in members)),
        _INITIAL: changed - newcomers[0].intersection(*newcomers[1:]) if newcomers else set(),
        _WITHOUT_HOOK: {name for name, of_another_rank in changed_by_hooks.items() if not of_another_rank},
        _OF_ANOTHER_RANK: {name for name, of_another_rank in changed_by_hooks.items() if of_another_rank},
    }
    for text, names in reported.items():
        if names:
            complete = text.format(names=", ".join(sorted(names)))
            session.metrics.loggers.event("recovery", complete, session.state.step)
            session.print_once(complete, complete)


def _abandon_batch(session: Session) -> Writer | None:
    """Abandon the interrupted batch; returns the writer of an abandoned checkpoint."""
    membership().shut()
    membership().send(WorkerMessage.LEFT, session.world.generation)
    session.stop_requests.close()
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


def _connect(session: Session, ft: RankRecords, generation: Generation) -> None:
    """Connect all parts that communicate to the new process group."""
    world = session.world
    session.metrics.world_changed(world, session.callbacks)
    session.renew_agreements()
    session.failures.errors = list(generation.failures)
    ft.resume_point, ft.end_point, ft.judging, ft.publishing, ft.options = None, None, False, False, []
    if ft.weights is not None:
        ft.weights.forget()
    session.balance.changes.clear()
    session.recorder.became(world.rank, world.size, generation.number)
    session.recorder.begin()
    session.metrics.loggers.repeat()
    if world.main_rank and not session.metrics.loggers and session.writes:
        session.metrics.loggers = LoggerDispatcher(session.loggers, session.run_dir, session.recorder, recovers=True)
        session.metrics.loggers.rewind(session.state.step)
    if ft.memory is not None:
        session.metrics.loggers.rewind(session.state.step)
        ft.memory.begin(session, generation.workers)
