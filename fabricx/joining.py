"""Ranks that come and go while others train, where each goes at its own pace: all are told of it when they meet."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from fabricx.comm.agree import StopAgreement
from fabricx.comm.links import Store
from fabricx.comm.world import World
from fabricx.data import Microbatch

if TYPE_CHECKING:
    from fabricx.trainer import Trainer

ARRIVE: Final = timedelta(seconds=60)  # how long a rank that was invited may take
FOR_EVER: Final = timedelta(days=365)


@dataclass
class Invitation:
    """What a rank that comes has to know.

    Attributes:
        generation: of the group that it will be in.
        section: number of the section of the data that ended with the meeting.
        planned: workers that updates were planned for.
        meeting: where the others are.
        run: their state.
    """

    generation: int
    section: int
    planned: int
    meeting: Microbatch
    run: dict[str, Any]


def change_members(t: Trainer, meeting: Microbatch) -> None:
    """Go on without those that died and with those that came; all that were there before call it."""
    dealer, world = t.strategy.dealer, t.world
    kept = tuple(worker for worker in dealer.workers if worker in dealer.present)
    newcomers = tuple(worker for worker in dealer.present if worker not in dealer.workers)
    generation = world.generation + 1
    if world.main_rank:
        invitation = Invitation(generation, dealer.section, dealer.planned, meeting, _run_of(t))
        for worker in newcomers:
            _tell(t, f"invitation/{worker}", invitation)
        arrived = [worker for worker in newcomers if _has_arrived(t, worker)]
        _tell(t, f"members/{generation}", (*kept, *arrived))
    members = _members(t, generation)
    for number, what in ((len(dealer.workers) - len(kept), "died"), (len(members) - len(kept), "joined")):
        if number:
            t.print(f"{number} of the workers {what}; {len(members)} go on")
    _go_on_with(t, members, generation)


def await_invitation(t: Trainer) -> Invitation:
    """Wait until the others meet, and take up their state; this rank is ready, and knows its servers."""
    invitation: Invitation = _hear(t, f"invitation/{t.world.rank}", FOR_EVER)
    run = invitation.run
    t.state.load_state_dict(run["state"])
    t.state.batch, t.state.samples = invitation.meeting.index + 1, invitation.meeting.position
    t.boundary, t.num_training_batches, t.val_every = run["boundary"], run["batches"], run["val_every"]
    for optimizer, groups in zip(t.optimizers, run["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
    for schedule, saved in zip(t.lr_schedulers, run["schedules"], strict=True):
        schedule.scheduler.load_state_dict(saved)
    for callback in t.callbacks:
        if callback.state_key in run["callbacks"]:
            callback.load_state_dict(run["callbacks"][callback.state_key])
    t.published.metrics.update(run["metrics"])
    return invitation


def arrive(t: Trainer, invitation: Invitation) -> Microbatch:
    """Join the others, who wait; returns where they are."""
    _store(t).set(t.world.key(f"arrived/{t.world.rank}"), "")
    members = _members(t, invitation.generation)
    t.strategy.dealer.section, t.strategy.dealer.planned = invitation.section, invitation.planned
    _go_on_with(t, members, invitation.generation)
    return invitation.meeting


def _go_on_with(t: Trainer, members: tuple[int, ...], generation: int) -> None:
    dealer, world = t.strategy.dealer, t.world
    number = world.rank if world.newcomer else dealer.workers[world.rank]
    rank, size = members.index(number), len(members)
    dealer.workers = dealer.present = members
    followed = replace(
        world, rank=rank, size=size, local_rank=rank, local_size=size, generation=generation, newcomer=False
    )  # all are on one machine
    _change_world(t, followed.followed())


def _change_world(t: Trainer, world: World) -> None:
    """Let everything that talks to other ranks know who they are now."""
    t.world = world
    t.strategy.world_changed(world)
    for metrics in {t.logbook.metrics, t.train_logbook.metrics}:
        metrics.world_changed(world.gather_objects, world.size)
    if t.agreement is not None:
        t.agreement.close()
        t.agreement = StopAgreement(world)
    if t.writer is not None:
        t.writer.close()
        t.writer = None
    for feed in (t.train_feed, *t.val_feeds):
        feed.world_changed(world)


def _members(t: Trainer, generation: int) -> tuple[int, ...]:
    members: tuple[int, ...] = _hear(t, f"members/{generation}", 2 * ARRIVE)
    if t.world.newcomer and t.world.rank not in members:
        raise TimeoutError("this worker took too long to join the others, and they go on without it")
    return members


def _has_arrived(t: Trainer, worker: int) -> bool:
    """Wait for one that was invited."""
    try:
        _store(t).wait([t.world.key(f"arrived/{worker}")], ARRIVE)
    except RuntimeError:  # it took too long
        return False
    return True


def _run_of(t: Trainer) -> dict[str, Any]:
    hyperparameters: list[Sequence[dict[str, Any]]] = [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in t.optimizers
    ]
    return {
        "state": t.state.state_dict(),
        "boundary": t.boundary,
        "batches": t.num_training_batches,
        "val_every": t.val_every,
        "groups": hyperparameters,
        "schedules": [schedule.scheduler.state_dict() for schedule in t.lr_schedulers],
        "callbacks": {callback.state_key: callback.state_dict() for callback in t.callbacks},
        "metrics": dict(t.published.metrics),
    }


def _tell(t: Trainer, name: str, content: Any) -> None:
    _store(t).set(t.world.key(name), base64.b64encode(pickle.dumps(content)).decode())


def _hear(t: Trainer, name: str, timeout: timedelta) -> Any:
    _store(t).wait([t.world.key(name)], timeout)
    return pickle.loads(base64.b64decode(_store(t).get(t.world.key(name))))


def _store(t: Trainer) -> Store:
    assert t.world.store is not None
    return t.world.store
