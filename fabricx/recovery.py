"""Going on when somebody of the group is gone, in the processes that are left, from the batch that was interrupted.

Those that are left, and those that come, join the next generation; all go on from where the furthest of them is. Ranks
are at most one collective apart, and what was complete on one of them has in it what all had given, also those that
are gone. Whoever was there keeps its weights; who comes gets them from another, and what only the lost one knew (its
random numbers, the sums that it had logged) from the slot that it left.
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
from fabricx.comm import slots
from fabricx.comm.agree import Agreement
from fabricx.comm.generations import Generation, membership
from fabricx.comm.world import World
from fabricx.copying import go_back
from fabricx.errors import ServerLost
from fabricx.restart_point import RestartPoint, of_word
from fabricx.scribe import Scribe
from fabricx.standing import NO_SUMS, leave_word, progress, standing, take_over, word_of
from fabricx.state import Phase
from fabricx.steps import wrap_steps

if TYPE_CHECKING:
    from fabricx.checkpoint import Writer
    from fabricx.trainer import Trainer

NOTICE_S: Final = 1.0  # from an error until the supervisor has said that somebody is gone
ANSWER_S: Final = 5.0  # from saying that links are cut until it has answered
NEWCOMER_S: Final = 600.0  # until there is a next generation
SIGNS: Final = ("onnection closed", "onnection reset", "roken pipe", "ocket")  # of links that are cut


@dataclass
class _Told:
    """What a member tells the others of itself.

    Attributes:
        progress: how far it is; nothing, if it has just come.
        points: what only it knows, or the one whose place it takes, by progress.
        now: the same at this moment, if it was there.
        gone: `points` of places that nobody takes, and since which generation they are empty.
    """

    progress: tuple[Any, ...] = ()
    points: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    now: dict[str, Any] | None = None
    gone: list[tuple[int, list[tuple[Any, dict[str, Any]]]]] = field(default_factory=list)

    def known(self, progress: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return what is to be gone on from where the others are that far."""
        exact = next((point for key, point in self.points if key == progress), None)
        return exact or self.now or _newest(self.points, progress)


def _newest(points: list[tuple[Any, dict[str, Any]]], progress: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the newest that isn't ahead: what a worker has left of a batch that the others have done, too.

    What it left in an earlier generation doesn't count: the members of this one have it among their sums.
    """
    behind = [(key, point) for key, point in points if key <= progress and key[-1] == progress[-1]]
    return max(behind, key=lambda entry: entry[0])[1] if behind else None


def recover(t: Trainer, error: Exception) -> None:
    """Go on in the next generation; raises the error if it isn't that somebody is gone, or if that can't be done."""
    torn = t.torn and t.copier is None  # else all go back to before that update
    if not membership().changes or torn or t.world.newcomer:
        raise error
    if any(callback.repeats_after(t, error) for callback in t.callbacks):
        traceback.clear_frames(error.__traceback__)  # and what they hold in memory
        membership().say("again", (t.world.generation, f"{type(error).__name__}; all begin the step again"))
    if not _lost_somebody(t.world.generation, error, t.world.silent):
        raise error
    _join_others(t, holds=True)


def take_part(t: Trainer) -> None:
    """Be one of those that train: from the beginning, or joining others who do already."""
    if t.world.newcomer:
        membership().say("ready")
        _join_others(t, holds=False)
        return
    if t.copier is not None:
        t.copier.begin(t, range(t.world.size))
    if t.strategy.dealer is not None:  # what the servers begin with comes from the main rank, and can't be replaced yet
        t.world.barrier()
    leave_word(t)
    membership().say("inside")  # it can go on with other members from now on


def _lost_somebody(generation: int, error: Exception, silent: bool) -> bool:
    """Return whether an error comes of somebody's being gone, or of links that were cut.

    Args:
        generation: in which it was raised.
        error: it; of whatever kind where collectives that are aborted give anything.
        silent: they do.
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
    """Go on in the next generation that all its members join.

    A generation may lose somebody while its members take over the state: then some have done so and others haven't.
    Until one is known to have gone on, which none does before all have taken over, each tells what it told at first.
    """
    own = membership()
    writer, given_up = _let_go(t) if holds else None, None
    began, step = time.monotonic(), t.state.step
    number, unchanged, taken_over = t.world.generation, holds, -1
    point = (t.epoch_end or t.restart_point or RestartPoint(t)) if holds and t.copier is None else None
    mine, state = (_Told() if point is None else _present(t, point)), None
    while True:
        generation = own.newer_than(number, NEWCOMER_S)
        if t.copier is not None and unchanged and generation.whole:
            t.copier.before_change(t)
        if 0 <= taken_over <= generation.settled:
            mine, state = _present(t, RestartPoint(t)), None
        number, unchanged, taken_over = generation.number, False, -1
        try:
            _join(t, generation)
            if writer is not None:  # all members have given up what they were writing by now
                given_up = writer.given_up
                writer.sweep()
                writer = None
            if t.copier is not None:
                known = go_back(t, came=not holds)
            else:
                mine, state = _agree(t, generation, mine, point, state)
                known, point, taken_over = state["failures"], None, number
            _go_on(t, generation)
            if mine.points and t.slot is not None:  # both are needed until it is known whether all have taken over
                t.slot.write(*mine.points[0])
            leave_word(t)  # before anybody reckons with it: who takes this one's place goes on from that
            mine.points.append((progress(t), word_of(t, RestartPoint(t))))
            lost = t.world.gather_objects(given_up)
            break
        except Exception as error:
            own.shut()
            if not _lost_somebody(number, error, t.world.silent):
                raise
    own.say("step", (number, t.state.step))
    _report(t, known, step if holds else t.state.step, time.monotonic() - began)
    _say_given_up(t, lost)


def _report(t: Trainer, known: int, reached: int, seconds: float) -> None:
    """Say what has happened; all know how much the others knew."""
    what = "; ".join(t.failures[known:]) or "others have come"
    workers = f"{t.world.size} workers go on" if t.world.size > 1 else "1 worker goes on"
    again = reached - t.state.step
    lost = f", train {again} step{'s' if again > 1 else ''} again" if again > 0 else ""
    text = f"{what}; {workers} from step {t.state.step}{lost}, after {seconds:.2f} s"
    t.scribe.event("recovery", text, t.state.step, steps_again=max(0, again), seconds=seconds)
    t.print(text)


def _say_given_up(t: Trainer, told: list[Path | None]) -> None:
    """Say that a checkpoint of the user's was lost with a worker, as any member knows."""
    if path := next((path for path in told if path is not None), None):
        text = (
            f"the checkpoint {path} was lost: it was being written when the workers changed, and is not there unless a "
            "hook saves it again"
        )
        t.scribe.event("checkpoint", text, t.state.step)
        t.print(text)


def _let_go(t: Trainer) -> Writer | None:
    """Give up what the interrupted batch was doing; returns the writer of a checkpoint that was given up."""
    membership().shut()
    if t.agreement is not None:
        t.agreement.close()
    writer, t.writer = t.writer, None
    if writer is not None:
        writer.abandon()
    if (dealer := t.strategy.dealer) is not None:  # others may train on, and come when their section is over
        dealer.let_all_meet()
    t.logbook = t.train_logbook
    t.logbook.end_batch()
    t.attach_log(t.logbook)
    t.state.phase = Phase.TRAIN
    return writer


def _join(t: Trainer, generation: Generation) -> None:
    """Join the group; all its members do."""
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
    """Wait until all members are there; unlike the group's own waiting this ends when one of them dies."""
    store = world.store
    assert store is not None
    store.set(world.key(f"here/{generation.number}/{membership().worker}"), "")
    keys = [world.key(f"here/{generation.number}/{worker}") for worker in generation.workers]
    while not store.check(keys):
        membership().check(generation.number)
        time.sleep(0.002)


def _present(t: Trainer, point: RestartPoint) -> _Told:
    """Return what a member has to tell that was there before."""
    now = word_of(t, RestartPoint(t))
    if t.epoch_end is not None:  # others may have done with this epoch
        now |= NO_SUMS
    return _Told(progress(t), [(progress(t), word_of(t, point))], now)


def _agree(
    t: Trainer, generation: Generation, mine: _Told, point: RestartPoint | None, before: dict[str, Any] | None
) -> tuple[_Told, dict[str, Any]]:
    """Bring all members to where the furthest is. Nothing is changed until all that is needed has come.

    Args:
        t: the trainer.
        generation: whose members agree.
        mine: what this member has to tell.
        point: where its batch began, if it was interrupted in one.
        before: the state that it has taken over in a generation in which nobody has gone on, if in one.

    Returns:
        what it has to tell, and the state that it has taken over, should nobody go on in this generation either.
    """
    world, told = t.world, _tell(t, generation, mine)
    furthest = max(one.progress for one in told)
    if not furthest:
        raise RuntimeError("no member of the group knows how far the run is")
    holder = [one.progress for one in told].index(furthest)
    state = world.broadcast_object((before or standing(t)) if world.rank == holder else None, holder)
    behind = mine.progress != furthest
    if t.strategy.dealer is None:
        weights: Any = _given(t, point, holder) if any(one.progress != furthest for one in told) else None
        words, whole = _of_all(told, furthest)
        place = world.rank if whole else None
        if behind:
            t.strategy.load_state_dict(weights, t.module, t.optimizers)
        elif point is not None and point.of_window:
            point.put_back_buffers(t.module)
        word = told[world.rank].known(furthest)
    else:  # the servers have the weights, and each keeps what is its own
        word = told[world.rank].known(furthest)
        words = [] if word is None else [word]
        place = 0 if words else None
    take_over(t, {**state, "ranks": [of_word(one) for one in words]}, place, came=not mine.progress)
    return _Told(furthest, [] if word is None else [(furthest, word)]), state


def _tell(t: Trainer, generation: Generation, mine: _Told) -> list[_Told]:
    """Return what each member has to tell, by rank: one that has just come knows what those before it have left."""
    own = membership()
    points, gone = mine.points, []
    if not mine.progress:
        points = _left_by(own.folder, generation.heirs.get(own.worker, ()))
    if t.world.main_rank:
        gone = [(since, _left_by(own.folder, workers)) for since, workers in generation.gone]
    return t.world.gather_objects(replace(mine, points=points, gone=gone))


def _left_by(folder: str, workers: Iterable[int]) -> list[tuple[Any, dict[str, Any]]]:
    return [entry for worker in workers for entry in slots.read(folder, worker)]


def _of_all(told: list[_Told], furthest: tuple[Any, ...]) -> tuple[list[dict[str, Any]], bool]:
    """Return what the ranks know by themselves, and whether each has its own; else the main rank keeps all sums."""
    known = [one.known(furthest) for one in told]
    empty = [points for one in told for since, points in one.gone if since > furthest[-1]]
    found = [one for one in (*known, *(_of_place(points, furthest) for points in empty)) if one is not None]
    return found, all(one is not None for one in known) and not empty


def _of_place(points: list[tuple[Any, dict[str, Any]]], furthest: tuple[Any, ...]) -> dict[str, Any] | None:
    return _Told(points=points).known(furthest)


def _given(t: Trainer, point: RestartPoint | None, holder: int) -> Any:
    """Return the weights and the optimizers' states of one rank, on all."""
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
    """Let everything that talks to other ranks know who they are now."""
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
    t.failures = list(generation.failures)
    t.restart_point = t.epoch_end = None
    t.balance.changes.clear()
    t.recorder.became(world.rank, world.size, generation.number)
    t.recorder.begin()
    if world.main_rank and not t.scribe and t.writes:
        t.scribe = Scribe(t.loggers, t.run_dir, t.recorder)
        t.scribe.rewind(t.state.step)
    if t.copier is not None:
        t.scribe.rewind(t.state.step)
        t.copier.begin(t, generation.workers)
