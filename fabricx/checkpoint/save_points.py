"""Moments of a run at which all ranks can write one checkpoint.

A rank without a sample of a batch has none of its hooks. It waits until those that have one have called theirs, and
takes part in the checkpoints that these write.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabricx.consistency.hook_effects import take
from fabricx.core.state import Phase
from fabricx.distributed.generations import membership
from fabricx.errors import RanksApart, RanksDisagree

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

ALL_CALL_S: Final = 60.0  # ranks are together, so the others call it as soon as they have come as far
LOOK_S: Final = 0.02
FOLLOW_S: Final = 0.002  # as long as an epoch's last batch at most is lengthened by this


def check_savable(t: Trainer, *, weights_only: bool) -> None:
    """Refuse a checkpoint from which the run would not go on as if nothing had happened.

    Raises:
        RanksApart: each rank goes at its own pace now.
        RuntimeError: a training step is going on, training has not begun, or another checkpoint is being collected.
    """
    if t.collecting:
        raise RuntimeError("save_checkpoint is called within on_save_checkpoint, for the checkpoint that calls it")
    if t.apart:
        raise RanksApart(
            "save_checkpoint: each rank takes its batches at its own pace here, and a checkpoint is of all ranks. Save "
            "in on_train_epoch_end or on_validation_end, or let ModelCheckpoint(every_n_train_steps=...) do it: all "
            "ranks meet for that"
        )
    if t.state.phase is Phase.IDLE and t.agreement is not None:
        raise RuntimeError(
            "save_checkpoint: training has not begun, so that weights and position may still be those of another run: "
            "save in on_train_start"
        )
    if t.in_step and t.idle_ranks:
        raise RuntimeError(
            "save_checkpoint: a training step is going on, and some ranks have no sample of this batch, so that they "
            "don't come here. Save in on_train_batch_end"
        )
    if t.in_step and not weights_only:
        raise RuntimeError(
            "save_checkpoint: a training step is going on, so that weights, random numbers and statistics would be "
            "newer than the position in the data. Save in on_train_batch_end, or with weights_only=True"
        )


def meet_to_save(t: Trainer, path: Path, *, weights_only: bool, wait: bool) -> None:
    """Wait until all ranks have called `save_checkpoint` with this path.

    Args:
        t: the trainer.
        path: of the checkpoint.
        weights_only, wait: what `save_checkpoint` was called with, for ranks without a sample, which follow.

    Raises:
        RanksDisagree: one has not, or with another path.
    """
    world = t.world
    if world.size == 1 or world.store is None or t.state.phase is Phase.IDLE:
        return
    key, call = _next_save(t), json.dumps([str(path), weights_only, wait])
    if t.idle_ranks:
        world.store.set(f"{key}/call", call)
    world.store.set(f"{key}/{world.rank}", call)
    deadline = time.monotonic() + ALL_CALL_S
    missing = [rank for rank in range(world.size) if rank != world.rank]
    while missing := [rank for rank in missing if not world.store.check([f"{key}/{rank}"])]:
        membership().check(world.generation)
        if time.monotonic() > deadline:
            raise RanksDisagree(
                f"rank {world.rank} has called save_checkpoint({str(path)!r}), and rank "
                f"{', '.join(map(str, missing))} has not in {ALL_CALL_S:g} s. Every rank has to call it, in the same "
                "hook, since each writes a part"
            )
        time.sleep(LOOK_S)
    calls = [json.loads(world.store.get(f"{key}/{rank}")) for rank in range(world.size)]
    if any(other != calls[0] for other in calls):
        told = "; ".join(
            f"rank {rank}: {other!r}, weights_only={weights}, wait={waits}"
            for rank, (other, weights, waits) in enumerate(calls)
        )
        raise RanksDisagree(f"save_checkpoint is called with other paths or options on other ranks: {told}")


def hooks_done(t: Trainer, changes: str = "", *, skip: bool = False) -> None:
    """Let ranks without a sample of this microbatch go on: this rank has called its hooks.

    Args:
        t: the trainer.
        changes: what they have changed; see `HookEffects`.
        skip: the hooks want the rest of the epoch to be skipped.
    """
    store, key = t.world.store, _next_hooks(t)
    assert store is not None
    if skip:
        store.set(f"{key}/skip", "")
    if changes:
        store.set(f"{key}/changes", changes)
    store.add(f"{key}/done", 1)
    if changes:
        take(t, changes, idle=False)


def follow_hooks(t: Trainer) -> bool:
    """Wait until ranks with a sample of this microbatch have called their hooks; save and change what they do.

    Returns:
        whether the rest of the epoch is skipped.
    """
    world, key = t.world, _next_hooks(t)
    store = world.store
    assert store is not None
    while True:
        # A rank is done only after its last call, so none is missed if this is asked for first.
        done = store.add(f"{key}/done", 0) >= world.size - t.idle_ranks
        call = f"{_key_of_save(t, _saves(t) + 1)}/call"
        if store.check([call]):
            path, weights_only, wait = json.loads(store.get(call))
            t.save_checkpoint(path, weights_only, wait=wait)
        elif done:
            if store.check([f"{key}/changes"]):
                take(t, store.get(f"{key}/changes").decode(), idle=True)
            return store.check([f"{key}/skip"])
        else:
            membership().check(world.generation)
            time.sleep(FOLLOW_S)


def _place(t: Trainer) -> tuple[int, ...]:
    return t.world.generation, t.state.epoch, t.state.step, t.state.batch


def _saves(t: Trainer) -> int:
    """Return the number of the newest checkpoint of this place in the data; -1 for none."""
    return t.saves[1] if t.saves[0] == _place(t) else -1


def _next_save(t: Trainer) -> str:
    t.saves = (_place(t), _saves(t) + 1)
    return _key_of_save(t, t.saves[1])


def _key_of_save(t: Trainer, number: int) -> str:
    return t.world.key("save/" + "/".join(map(str, (*_place(t), number))))


def _next_hooks(t: Trainer) -> str:
    """Return where ranks say that they have called hooks of which others have none; each such place has a number."""
    generation = t.world.generation
    t.followed = (generation, t.followed[1] + 1 if t.followed[0] == generation else 0)
    return t.world.key(f"hooks/{generation}/{t.followed[1]}")
