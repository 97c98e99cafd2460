"""Going on when somebody of the group is gone, in the processes that are left, from the batch that was interrupted.

Those that are left, and those that come, join the next generation; all go on from where the furthest of them is. Ranks
are at most one collective apart, and what was complete on one of them has in it what all had given, also those that
are gone. Whoever was there keeps its weights; who comes gets them from another, and what only the lost one knew (its
random numbers, the sums that it had logged) from the slot that it left.
"""

from __future__ import annotations

import time
import traceback
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
from fabricx.standing import leave_word, progress, standing, take_over, word_of
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
        gone: `points` of those whose places nobody takes.
    """

    progress: tuple[Any, ...] = ()
    points: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    now: dict[str, Any] | None = None
    gone: list[list[tuple[Any, dict[str, Any]]]] = field(default_factory=list)

    def known(self, progress: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return what is to be gone on from where the others are that far."""
        exact = next((point for key, point in self.points if key == progress), None)
        return exact or self.now or _newest(self.points, progress)


def _newest(points: list[tuple[Any, dict[str, Any]]], progress: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return the newest that isn't ahead: what a worker has left of a batch that the others have done, too."""
    behind = [(key, point) for key, point in points if key <= progress]
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
    own = membership()
    writer, given_up = _let_go(t) if holds else None, None
    began, step = time.monotonic(), t.state.step
    number, unchanged = t.world.generation, holds
    point = (t.restart_point or RestartPoint(t)) if holds and t.copier is None else None
    while True:
        generation = own.newer_than(number, NEWCOMER_S)
        if t.copier is not None and unchanged and generation.whole:
            t.copier.before_change(t)
        number, unchanged = generation.number, False
        try:
            _join(t, generation)
            if writer is not None:  # all members have given up what they were writing by now
                given_up = writer.given_up
                writer.sweep()
                writer = None
            if t.copier is not None:
                known = go_back(t, came=not holds)
            else:
                known = _agree(t, generation, point)
                point = RestartPoint(t)  # should what comes now fail, too
            lost = t.world.gather_objects(given_up)
            _go_on(t, generation)
            break
        except Exception as error:
            own.shut()
            if not _lost_somebody(number, error, t.world.silent):
                raise
    leave_word(t)  # before anybody reckons with it: who takes this one's place goes on from that
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


def _agree(t: Trainer, generation: Generation, point: RestartPoint | None) -> int:
    """Bring all members to where the furthest is. Nothing is changed until all that is needed has come.

    Returns:
        how many failures the members knew of.
    """
    world, mine = t.world, _word_of(t, generation, point)
    told: list[_Told] = world.gather_objects(mine)
    furthest = max(one.progress for one in told)
    if not furthest:
        raise RuntimeError("no member of the group knows how far the run is")
    holder = [one.progress for one in told].index(furthest)
    state = world.broadcast_object(standing(t) if world.rank == holder else None, holder)
    behind = mine.progress != furthest
    if t.strategy.dealer is None:
        weights: Any = _given(t, point, holder) if any(one.progress != furthest for one in told) else None
        words, whole = _of_all(told, furthest)
        place = world.rank if whole else None
        if behind:
            t.strategy.load_state_dict(weights, t.module, t.optimizers)
        elif point is not None and point.of_window:
            point.put_back_buffers(t.module)
    else:  # the servers have the weights, and each keeps what is its own
        words = [word] if (word := mine.known(furthest)) is not None else []
        place = 0 if words else None
    state["ranks"] = [of_word(word) for word in words]
    take_over(t, state, place, came=not mine.progress)
    known: int = state["failures"]
    return known


def _word_of(t: Trainer, generation: Generation, point: RestartPoint | None) -> _Told:
    """Return what this member has to tell."""
    own = membership()
    told = _Told()
    if point is not None:
        told = _Told(progress(t), [(progress(t), word_of(t, point))], word_of(t, RestartPoint(t)))
    elif own.worker in generation.heirs:
        told.points = slots.read(own.folder, generation.heirs[own.worker])
    if t.world.main_rank:
        told.gone = [slots.read(own.folder, worker) for worker in generation.gone]
    return told


def _of_all(told: list[_Told], furthest: tuple[Any, ...]) -> tuple[list[dict[str, Any]], bool]:
    """Return what the ranks know by themselves, and whether each has its own; else the main rank keeps all sums."""
    known = [one.known(furthest) for one in told]
    gone = [_newest(points, furthest) for one in told for points in one.gone]
    found = [one for one in (*known, *gone) if one is not None]
    return found, all(one is not None for one in known) and not gone


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
    reason = None if t.agreement is None else t.agreement.reason
    t.agreement = Agreement(world)
    if reason is not None:
        t.agreement.request(reason)
    t.failures = list(generation.failures)
    t.restart_point = None
    t.balance.changes.clear()
    t.recorder.became(world.rank, world.size, generation.number)
    t.recorder.begin()
    if world.main_rank and not t.scribe and t.writes:
        t.scribe = Scribe(t.loggers, t.run_dir, t.recorder)
        t.scribe.rewind(t.state.step)
    if t.copier is not None:
        t.scribe.rewind(t.state.step)
        t.copier.begin(t, generation.workers)
