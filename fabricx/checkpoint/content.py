"""The contents of a checkpoint, and resuming a run from them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricx import checkpoint
from fabricx.checkpoint.rank_state import RankState, go_on_from
from fabricx.checkpoint.save_points import check_savable, meet_to_save
from fabricx.consistency.comparison import of_added
from fabricx.core.callback import Callback
from fabricx.core.hparams import plain
from fabricx.core.optimizers import load_schedules
from fabricx.core.rng import RandomState
from fabricx.core.schedule import validation_due_of_end, validation_interval
from fabricx.data import Feed
from fabricx.data.own_state import set_generators
from fabricx.data.setup import count_batches, rebuild_feeds
from fabricx.errors import CheckpointError
from fabricx.redaction import masked
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

_NEEDED: Final = ("state", "schedules", "metrics", "precision", "callbacks", "datamodule", "ranks")


def save_checkpoint(
    t: Trainer, path: Path, *, weights_only: bool, wait: bool = True,
    after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Begin to write a checkpoint of the run, with all ranks; `t.writer` knows when it is there."""
    if t.module is None:
        raise ValueError("save_checkpoint: the trainer has run nothing yet, so there is nothing to save")
    if t.world.newcomer:  # those that it comes to have saved, or will
        return
    check_savable(t, weights_only=weights_only)
    if after is None or t.idle_ranks:  # else a callback of fabricx saves, on all ranks in the same step
        meet_to_save(t, path, weights_only=weights_only, wait=wait)
    # Within a validation too: tensors of inference mode couldn't be written over when the next one is saved.
    with t.recorder.within(Span.CHECKPOINT), torch.inference_mode(False):
        _begin_checkpoint(t, path, weights_only, after, failed)


def _begin_checkpoint(
    t: Trainer, path: Path, weights_only: bool, after: Callable[[], None] | None, failed: Callable[[], None] | None
) -> None:  # fmt: skip
    began = time.monotonic()
    point = t.rank_state or RankState(t)
    t.strategy.quiesce(point.buffers)
    state: dict[str, Any] = {
        "strategy": t.strategy.state_dict(t.module, [] if weights_only else t.optimizers),
        "hparams": masked(plain(t.module.hparams)),
        "state": t.state.state_dict(),
    }
    state["strategy"]["module"].update(point.buffers)
    if not weights_only:
        state |= {**run_state(t), "ranks": t.world.gather_objects(point.state_dict())}
    known = set(state)
    t.collecting = True
    try:
        for hook in t.hooks.on_save_checkpoint if t.hooks is not None else ():
            hook(state)
    finally:
        t.collecting = False
    _say_lost(t, {name: value for name, value in state.items() if name not in known})
    own = next(one for one in type(t.module).__mro__ if not hasattr(one, "reshard"))  # fully_shard makes a class
    manifest: dict[str, Any] = {
        "step": t.state.step,
        "epoch": t.state.epoch,
        "samples": t.state.samples,
        "world_size": t.world.size,
        "ranks": t.state.ranks,
        "strategy": type(t.strategy).__name__,
        "module": f"{own.__module__}.{own.__qualname__}",
        "precision": t.precision,
        "weights_only": weights_only,
        "hparams": masked(plain(t.module.hparams)),
        "configuration": masked(t.configuration),
    }

    def full() -> None:
        t.logger_dispatcher.event("checkpoint", f"{path} could not be written: the disk is full", manifest["step"])
        if failed is not None:
            failed()

    def done() -> None:
        t.recorder.event("checkpoint", f"{path} is complete", manifest["step"], seconds=time.monotonic() - began)
        if after is not None:
            after()

    t.writer = t.writer or checkpoint.Writer(t.world)
    t.writer.begin(path, state, manifest, done, full, repeated=after is not None)


def _say_lost(t: Trainer, added: Mapping[str, Any]) -> None:
    """Say what hooks of other ranks have added: a checkpoint has what rank 0 adds; every rank calls it."""
    by_rank = t.world.gather_objects(of_added(added)) if t.world.size > 1 else []
    names = sorted({str(name) for other in by_rank for name in other if other[name] != by_rank[0].get(name)})
    if names and t.world.main_rank:
        warnings.warn(
            f"on_save_checkpoint adds other values on other ranks ({', '.join(names)}), and a checkpoint has those of "
            "rank 0 only: let each rank add those of all, brought together by self.all_gather or "
            "torch.distributed.all_gather_object, and take its own in on_load_checkpoint",
            stacklevel=2,
        )


def run_state(t: Trainer) -> dict[str, Any]:
    """Return what all ranks go on from beside the weights, as plain data and tensors."""
    return {
        "state": t.state.state_dict(),
        "global_batch": _global_batch(t),
        "accumulate": t.accumulate_grad_batches,
        "batches": t.num_training_batches,
        "order": "" if t.train_feed is None else t.train_feed.order or t.train_feed.order_before,
        "drawn": [feed.drawn for feed in _feeds(t)],
        "schedules": [schedule.scheduler.state_dict() for schedule in t.lr_schedulers],
        "scheduled": [schedule.described for schedule in t.lr_schedulers],
        # A schedule that waits for the epoch's end may look at one; of the sanity check, nothing stays.
        "metrics": {} if t.sanity_checking else dict(t.published.metrics),
        "precision": t.precision_plugin.state_dict(),
        "callbacks": {key: callback.state_dict() for key, callback in _by_key(t.callbacks).items()},
        "datamodule": t.datamodule.state_dict() if t.datamodule is not None else {},
    }


def _feeds(t: Trainer) -> list[Feed]:
    return [] if t.train_feed is None else [t.train_feed, *t.val_feeds]


def _by_key(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by the names of their states; several of the same `state_key` are numbered in their order."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 2
        while key in found:
            key, number = f"{callback.state_key}/{number}", number + 1
        found[key] = callback
    return found


def restore(t: Trainer, path: Path, *, weights_only: bool) -> None:
    """Take up a checkpoint: all of it to train on, the weights alone to evaluate.

    Raises:
        CheckpointError: it holds weights only, and training can't go on from those.
    """
    # It was verified when it was chosen, before any process started.
    from fabricx.checkpoint.reader import weights_of

    state = checkpoint.load(path, t.world.device, t.strategy.sharded_parameters(), verified=True)
    for hook in t.hooks.on_load_checkpoint:
        hook(state)
    weights = weights_of(state, path)
    if weights_only:
        t.module.load_state_dict(weights)
        return
    if "schedules" not in state:
        raise CheckpointError(f"{path} holds weights only: it can be evaluated, but training can't go on from it")
    if lacking := [part for part in _NEEDED if part not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}: training can't go on from it")
    t.strategy.load_state_dict(state["strategy"], t.module, t.optimizers)
    state["state"]["attempt"] = state["state"].get("attempt", 0) + 1
    take_up(t, state, own=t.world.rank if len(state["ranks"]) == t.world.size else None)
    t.logger_dispatcher.rewind(t.state.step)


def take_up(t: Trainer, state: dict[str, Any], *, own: int | None) -> None:
    """Go on from a state of all ranks, the weights aside.

    Args:
        t: the trainer.
        state: `run_state`, and what each rank knows by itself as "ranks".
        own: which of those this one goes on from; None if the ranks have changed: sums that belong together are joined.
    """
    for optimizer in t.optimizers:  # else torch warns of a schedule that steps first, at the end of an epoch
        vars(optimizer)["_opt_called"] = bool(state["state"]["step"])
    load_schedules(t.lr_schedulers, state["schedules"], state.get("scheduled"))
    t.published.metrics.update(state["metrics"])
    t.precision_plugin.load_state_dict(state["precision"])
    t.state.load_state_dict(state["state"])
    at_first = [feed.at_first for feed in _feeds(t)]
    rebuild_feeds(t)
    for feed, first in zip(_feeds(t), at_first, strict=False):
        feed.at_first = first
    if t.world.size == 1 or t.use_distributed_sampler:  # else each rank has an order of its own
        t.train_feed.order_before = state.get("order", "")
        for feed, drawn in zip(_feeds(t), state.get("drawn", ()), strict=False):
            feed.drawn = drawn
    if t.state.batch and "order" in state and bool(state["order"]) != t.train_feed.exact_position:
        t.print(
            "the epoch of the checkpoint was read from another kind of loader than "
            f"{type(t.train_dataloader).__name__}: some of its samples are trained twice, and others not at all"
        )
    own_accumulation = t.accumulate_grad_batches
    t.taken_up = (state.get("global_batch", 0), state.get("accumulate", own_accumulation), own_accumulation)
    go_on_from(t, state["ranks"], own=own)
    for feed in _feeds(t):
        feed.place_sampler(t.state.epoch)
    if t.state.step and (lost := t.train_feed.lost_generators(within=t.state.batch > 0)):
        t.print(
            f"loader processes draw from generators of the data's own ({', '.join(lost)}), and these begin anew: the "
            "random numbers are others than without the interruption. Draw from torch's, numpy's or python's global "
            "generator, which each batch seeds"
        )
    before, trained = t.state.shared_by, t.state.batch
    count_again(t)
    _end_shortened_epoch(t, trained, state.get("batches", 0))
    if own is None or before != t.world.size:
        _say_other_ranks(t, before)
    elif t.train_feed.reads_again:
        _take_up_by_reading(t)
    known = _by_key(t.callbacks)
    if unused := [key for key, kept in state["callbacks"].items() if kept and key not in known]:
        t.print(f"no callback of this run takes over what the checkpoint has of {', '.join(unused)}")
    for key, callback in known.items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    if t.datamodule is not None and state["datamodule"]:
        t.datamodule.load_state_dict(state["datamodule"])
    place = t.world.rank if own is None else own
    if place < len(state["ranks"]):
        RandomState.of(state["ranks"][place]["random"]).restore()
        set_generators(t.own_generators, state["ranks"][place].get("own", {}))


def _global_batch(t: Trainer) -> int:
    """Return the samples of one update; 0 where that isn't known."""
    whole = int(getattr(t.train_feed, "global_batch", 0)) * t.accumulate_grad_batches
    return whole if t.strategy.steps_globally else whole // max(1, t.state.ranks)


def say_change(t: Trainer) -> None:
    """Say which global batch is used if it isn't the checkpoint's; hooks of the epoch's start may have set it.

    Where an epoch begins, that may be another one than in the epoch before: a schedule of the run itself.
    """
    if t.taken_up is None:
        return
    (before, accumulated, own), t.taken_up = t.taken_up, None
    now, accumulate = _global_batch(t), t.accumulate_grad_batches
    same_batch = before // accumulated == now // accumulate
    changed = accumulate == own != accumulated
    if t.state.samples or not same_batch or changed:
        _say_global_batch(t, before)
    if changed and not (before and now):
        t.print(f"each update has {accumulate} batches of each rank from here on, where it had {accumulated} before")


def _say_global_batch(t: Trainer, before: int) -> None:
    """Say which global batch is used if it isn't the checkpoint's: it is kept when only the number of ranks changes."""
    now = _global_batch(t)
    if not before or not now or now == before:
        return
    why = (
        f"a global batch is batch_size x accumulate_grad_batches x the {t.state.ranks} "
        f"rank{'s' if t.state.ranks > 1 else ''} that the run began with, however many go on"
    )
    if not t.strategy.steps_globally:
        why = "an update is of batch_size x accumulate_grad_batches samples of one worker, however many there are"
    t.print(
        f"each update has {now} samples from here on, where it had {before} before the checkpoint: {why}; learning "
        "rates are not adapted"
    )


def count_again(t: Trainer) -> None:
    """Count the batches of the epoch, and the trained ones of these, by the present ranks and global batches.

    Ranks change between runs and in a run; the accumulation from epoch to epoch; the size of a batch between runs.
    """
    state, feed = t.state, t.train_feed
    before = (state.shared_by, state.accumulate, state.together)
    now = (t.world.size, t.accumulate_grad_batches, feed.global_batch)
    state.shared_by, state.accumulate, state.together = now
    if now == before or not before[1]:
        return
    count_batches(t)
    t.val_every = validation_interval(t)
    found = feed.batches_before(state.samples, t.accumulate_grad_batches)
    if found is not None:
        state.batch = found


def _end_shortened_epoch(t: Trainer, trained: int, before: int | float) -> None:
    """Let an epoch end with its validation, if fewer batches are left of it than the checkpoint has trained.

    Args:
        t: the trainer.
        trained: batches of the epoch that the checkpoint has trained, by its own count.
        before: those that the epoch had there.
    """
    state, now = t.state, t.num_training_batches
    if not (0 < trained < before and 0 < now <= state.batch):
        return
    t.print(
        f"epoch {state.epoch} has {now} batches from here on, where it had {before} before the checkpoint, and "
        f"{trained} were trained: it ends here"
    )
    state.validating = state.validating or validation_due_of_end(t, trained, before)


def _say_other_ranks(t: Trainer, before: int) -> None:
    """Say that places in streams are lost, where other ranks have begun the epoch."""
    if t.train_feed.batches_before(t.state.samples, t.accumulate_grad_batches) is None and t.state.batch:
        t.print(
            f"the checkpoint was written by {before} ranks, and {t.world.size} go on: what each rank reads is its own "
            "loader's affair, so some samples of this epoch may be trained twice or not at all"
        )


def _take_up_by_reading(t: Trainer) -> None:
    """Say what can't be known of a stream that doesn't keep its place."""
    if not t.state.batch or isinstance(t.train_dataloader, Sequence):  # nothing to read, or the same batches again
        return
    t.print(
        f"{type(t.train_dataloader).__name__} has no state_dict, so its place in the data isn't known: its first "
        f"{t.state.batch} batches of this epoch are read again, with the random numbers that the epoch began with. The "
        "run goes on exactly where it stopped if they are the same batches; if their order is drawn from other random "
        "numbers, or between batches, some samples are trained twice and others not at all. A map-style "
        "DataLoader, or a loader with state_dict and load_state_dict, goes on exactly"
    )
