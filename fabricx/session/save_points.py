"""Synchronisation of ranks for checkpoints that users' hooks write.

A rank without a sample of a batch does not call the hooks of that batch. It waits until the other ranks have called
their hooks, and takes part in the checkpoints that these write.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabricx.core.state import Phase
from fabricx.distributed.membership.generations import membership
from fabricx.errors import RanksApart, RanksDisagree

if TYPE_CHECKING:
    from fabricx.session.session import Session

ALL_CALL_S: Final = 60.0  # in lockstep, the other ranks call it as soon as they reach the same hook
LOOK_S: Final = 0.02
FOLLOW_S: Final = 0.002  # the last batch of an epoch takes at most this much longer


def check_savable(session: Session, *, weights_only: bool) -> None:
    """Refuse a checkpoint from which the run could not resume exactly.

    Args:
        session: the run's session.
        weights_only: as in `save_checkpoint`.

    Raises:
        RanksApart: ranks work at their own pace at present.
        RuntimeError: a training step is running, training has not begun, or another checkpoint is being collected.
    """
    if session.checkpoints.collecting:
        raise RuntimeError(
            "save_checkpoint was called in on_save_checkpoint, a hook that runs during a save; call it in another hook"
        )
    if session.batch.asynchronous:
        raise RanksApart(
            "save_checkpoint: each rank works at its own pace, and a checkpoint needs all ranks. Save in "
            "on_train_epoch_end or on_validation_end, or use ModelCheckpoint(every_n_train_steps=...), which brings "
            "all ranks together"
        )
    if session.state.phase is Phase.IDLE and session.running:
        raise RuntimeError(
            "save_checkpoint: training has not begun, so weights and position may still be those of another run: "
            "save in on_train_start"
        )
    if session.batch.in_step and session.batch.idle_ranks:
        raise RuntimeError(
            "save_checkpoint: a training step is running, and some ranks have no sample of this batch, so they "
            "don't call it. Save in on_train_batch_end"
        )
    if session.batch.in_step and not weights_only:
        raise RuntimeError(
            "save_checkpoint: a training step is running, so weights, random numbers and statistics would be "
            "newer than the position in the data. Save in on_train_batch_end, or with weights_only=True"
        )


def meet_to_save(
    session: Session, path: Path, *, weights_only: bool, wait: bool, single_file: bool | None = None
) -> None:  # fmt: skip
    """Wait until all ranks have called `save_checkpoint` with the same arguments.

    Args:
        session: the run's session.
        path: path of the checkpoint.
        weights_only, wait, single_file: further arguments of `save_checkpoint`, which ranks without a sample copy.

    Raises:
        RanksDisagree: a rank has not called it, or with other arguments.
    """
    world = session.world
    if world.size == 1 or world.store is None or session.state.phase is Phase.IDLE:
        return
    key, call = _next_save(session), json.dumps([str(path), weights_only, wait, single_file])
    if session.batch.idle_ranks:
        world.store.set(f"{key}/call", call)
    world.store.set(f"{key}/{world.rank}", call)
    deadline = time.monotonic() + ALL_CALL_S
    missing = [rank for rank in range(world.size) if rank != world.rank]
    while missing := [rank for rank in missing if not world.store.check([f"{key}/{rank}"])]:
        membership().check(world.generation)
        if time.monotonic() > deadline:
            raise RanksDisagree(
                f"rank {world.rank} has called save_checkpoint({str(path)!r}), and rank "
                f"{', '.join(map(str, missing))} has not within {ALL_CALL_S:g} s. Every rank has to call it, in the "
                "same hook, since each writes a part"
            )
        time.sleep(LOOK_S)
    calls = [json.loads(world.store.get(f"{key}/{rank}")) for rank in range(world.size)]
    if any(other != calls[0] for other in calls):
        listed = "; ".join(
            f"rank {rank}: {other!r}, weights_only={weights}, wait={waits}"
            for rank, (other, weights, waits, _) in enumerate(calls)
        )
        raise RanksDisagree(
            f"save_checkpoint was called with different paths or options on the ranks: {listed}. Pass the same "
            "arguments on all ranks"
        )


def publish_hooks_done(session: Session, changes: str = "", *, skip: bool = False) -> None:
    """Notify ranks without a sample of this microbatch that this rank has called its hooks.

    Args:
        session: session of a fit.
        changes: changes by the hooks; see `HookEffects`.
        skip: the hooks request to skip the rest of the epoch.
    """
    store, key = session.world.store, _next_hooks(session)
    assert store is not None
    if skip:
        store.set(f"{key}/skip", "")
    if changes:
        store.set(f"{key}/changes", changes)
    store.add(f"{key}/done", 1)
    if changes:
        session.checks.apply_changes(changes, idle=False)


def follow_hooks(session: Session) -> bool:
    """Wait until the ranks with a sample of this microbatch have called their hooks, and repeat saves and changes.

    Args:
        session: session of a fit, on a rank without a sample.

    Returns:
        Whether the rest of the epoch is skipped.
    """
    world, key = session.world, _next_hooks(session)
    store = world.store
    assert store is not None
    while True:
        # Read `done` before `call`: a rank counts as done after its last call, so no call is missed.
        done = store.add(f"{key}/done", 0) >= world.size - session.batch.idle_ranks
        call = f"{_key_of_save(session, _saves(session) + 1)}/call"
        if store.check([call]):
            path, weights_only, wait, single_file = json.loads(store.get(call))
            session.trainer.save_checkpoint(path, weights_only, wait=wait, single_file=single_file)
        elif done:
            if store.check([f"{key}/changes"]):
                session.checks.apply_changes(store.get(f"{key}/changes").decode(), idle=True)
            return store.check([f"{key}/skip"])
        else:
            membership().check(world.generation)
            time.sleep(FOLLOW_S)


def _place(session: Session) -> tuple[int, ...]:
    """Return the position of the run, which is the same on all ranks when they save."""
    state = session.state
    batch = state.batch if session.strategy.traits.lockstep else 0  # ranks at their own pace differ in streams
    return session.world.generation, state.epoch, state.step, batch


def _saves(session: Session) -> int:
    """Return the number of the newest checkpoint at this position in the data; -1 for none."""
    return session.checkpoints.saves[1] if session.checkpoints.saves[0] == _place(session) else -1


def _next_save(session: Session) -> str:
    session.checkpoints.saves = (_place(session), _saves(session) + 1)
    return _key_of_save(session, session.checkpoints.saves[1])


def _key_of_save(session: Session, number: int) -> str:
    return session.world.key("save/" + "/".join(map(str, (*_place(session), number))))


def _next_hooks(session: Session) -> str:
    """Return the store key for the next hooks that some ranks don't call; such hooks are counted per generation."""
    generation = session.world.generation
    session.checkpoints.followed = (
        generation,
        session.checkpoints.followed[1] + 1 if session.checkpoints.followed[0] == generation else 0,
    )
    return session.world.key(f"hooks/{generation}/{session.checkpoints.followed[1]}")
