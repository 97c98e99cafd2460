"""Content of a checkpoint, and resuming a run from it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricx import checkpoint
from fabricx.checkpoint.rank_state import RankState, restore_rank_states
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
    trainer: Trainer, path: Path, *, weights_only: bool, wait: bool = True,
    after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Start to write a checkpoint of the run; every rank calls it. `trainer.writer` reports when it is complete.

    Args:
        trainer: of the run.
        path: folder of the checkpoint.
        weights_only: save no state of optimizers, schedulers, callbacks and data.
        wait: the caller waits until the checkpoint is complete; ranks without a sample do the same.
        after: called on the main rank when the checkpoint is complete; set by callbacks of fabricx.
        failed: called on every rank if the disk was full.

    Raises:
        ValueError: the trainer has run nothing yet.
        RanksApart, RanksDisagree, RuntimeError: see `check_savable` and `meet_to_save`.
    """
    if trainer.module is None:
        raise ValueError("save_checkpoint: the trainer has run nothing yet, so there is nothing to save")
    if trainer.world.newcomer:  # the ranks that it will join save the checkpoint
        return
    check_savable(trainer, weights_only=weights_only)
    if after is None or trainer.idle_ranks:  # otherwise a callback of fabricx saves, on all ranks in the same step
        meet_to_save(trainer, path, weights_only=weights_only, wait=wait)
    # inference_mode off, also within a validation: the next snapshot could not overwrite inference tensors.
    with trainer.recorder.within(Span.CHECKPOINT), torch.inference_mode(False):
        _begin_checkpoint(trainer, path, weights_only, after, failed)


def _begin_checkpoint(
    trainer: Trainer,
    path: Path,
    weights_only: bool,
    after: Callable[[], None] | None,
    failed: Callable[[], None] | None,
) -> None:
    began = time.monotonic()
    point = trainer.fault_tolerance.resume_point or RankState(trainer)
    trainer.strategy.quiesce(point.buffers)
    state: dict[str, Any] = {
        "strategy": trainer.strategy.state_dict(trainer.module, [] if weights_only else trainer.optimizers),
        "hparams": masked(plain(trainer.module.hparams)),
        "state": trainer.state.state_dict(),
    }
    state["strategy"]["module"].update(point.buffers)
    if not weights_only:
        state |= {**run_state(trainer), "ranks": trainer.world.gather_objects(point.state_dict())}
    known = set(state)
    trainer.collecting = True
    try:
        for hook in trainer.hooks.on_save_checkpoint if trainer.hooks is not None else ():
            hook(state)
    finally:
        trainer.collecting = False
    _warn_if_lost(trainer, {name: value for name, value in state.items() if name not in known})
    # fully_shard derives a class with `reshard`; save the user's class.
    module_class = next(c for c in type(trainer.module).__mro__ if not hasattr(c, "reshard"))
    manifest: dict[str, Any] = {
        "run": [trainer.state.run, trainer.run_dir.name if trainer.run_dir is not None else ""],
        "step": trainer.state.step,
        "epoch": trainer.state.epoch,
        "samples": trainer.state.samples,
        "world_size": trainer.world.size,
        "ranks": trainer.state.ranks,
        "strategy": type(trainer.strategy).__name__,
        "module": f"{module_class.__module__}.{module_class.__qualname__}",
        "precision": trainer.precision,
        "weights_only": weights_only,
        "hparams": masked(plain(trainer.module.hparams)),
        "configuration": masked(trainer.configuration),
    }

    def full() -> None:
        trainer.logger_dispatcher.event(
            "checkpoint", f"{path} could not be written: the disk is full", manifest["step"]
        )
        if failed is not None:
            failed()

    def done() -> None:
        trainer.recorder.event("checkpoint", f"{path} is complete", manifest["step"], seconds=time.monotonic() - began)
        if after is not None:
            after()

    trainer.writer = trainer.writer or checkpoint.Writer(trainer.world)
    trainer.writer.begin(path, state, manifest, done, full, repeated=after is not None)


def _warn_if_lost(trainer: Trainer, added: Mapping[str, Any]) -> None:
    """Warn if hooks add different values on other ranks: only those of rank 0 are saved; every rank calls it."""
    by_rank = trainer.world.gather_objects(of_added(added)) if trainer.world.size > 1 else []
    names = sorted({str(name) for other in by_rank for name in other if other[name] != by_rank[0].get(name)})
    if names and trainer.world.main_rank:
        warnings.warn(
            f"on_save_checkpoint adds other values on other ranks ({', '.join(names)}), and a checkpoint has those of "
            "rank 0 only: let each rank add the values of all ranks, gathered by self.all_gather or "
            "torch.distributed.all_gather_object, and select its own in on_load_checkpoint",
            stacklevel=2,
        )


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Return the resume state that all ranks share, without weights, as plain data and tensors.

    Args:
        trainer: of a fit.
    """
    return {
        "state": trainer.state.state_dict(),
        "global_batch": _global_batch(trainer),
        "accumulate": trainer.accumulate_grad_batches,
        "batches": trainer.num_training_batches,
        "order": "" if trainer.train_feed is None else trainer.train_feed.order or trainer.train_feed.order_before,
        "drawn": [feed.drawn for feed in _feeds(trainer)],
        "schedules": [schedule.scheduler.state_dict() for schedule in trainer.lr_schedulers],
        "scheduled": [schedule.described for schedule in trainer.lr_schedulers],
        # For a scheduler that monitors a metric at the epoch's end. Metrics of the sanity check are discarded.
        "metrics": {} if trainer.sanity_checking else dict(trainer.published.metrics),
        "precision": trainer.precision_plugin.state_dict(),
        "callbacks": {key: callback.state_dict() for key, callback in _by_key(trainer.callbacks).items()},
        "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
    }


def _feeds(trainer: Trainer) -> list[Feed]:
    return [] if trainer.train_feed is None else [trainer.train_feed, *trainer.val_feeds]


def _by_key(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by the names of their states; callbacks with the same `state_key` are numbered in order."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 2
        while key in named:
            key, number = f"{callback.state_key}/{number}", number + 1
        named[key] = callback
    return named


def restore(trainer: Trainer, path: Path, *, weights_only: bool) -> None:
    """Load a checkpoint into a run: the whole state for training, or the weights for evaluation.

    Args:
        trainer: with module, optimizers and feeds.
        path: verified by the process that has chosen the checkpoint, before it started workers.
        weights_only: load the weights only.

    Raises:
        CheckpointError: the checkpoint lacks state that training needs.
    """
    # It was verified when it was chosen, before any process started.
    from fabricx.checkpoint.reader import weights_of

    state = checkpoint.load(path, trainer.world.device, trainer.strategy.sharded_parameters(), verified=True)
    for hook in trainer.hooks.on_load_checkpoint:
        hook(state)
    weights = weights_of(state, path)
    if weights_only:
        trainer.module.load_state_dict(weights)
        return
    if "schedules" not in state:
        raise CheckpointError(f"{path} holds weights only: it can be evaluated, but training can't go on from it")
    if missing := [part for part in _NEEDED if part not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}: training can't go on from it")
    trainer.strategy.load_state_dict(state["strategy"], trainer.module, trainer.optimizers)
    state["state"]["attempt"] = state["state"].get("attempt", 0) + 1
    rank = trainer.world.rank if len(state["ranks"]) == trainer.world.size else None
    restore_run(trainer, state, rank=rank)
    trainer.logger_dispatcher.rewind(trainer.state.step)


def restore_run(trainer: Trainer, state: dict[str, Any], *, rank: int | None) -> None:
    """Restore the run's state, except the weights.

    Args:
        trainer: of a fit.
        state: result of `run_state`, with the list of rank states as "ranks".
        rank: index of this rank's state in "ranks"; None if the ranks have changed: metric sums are then merged.
    """
    for optimizer in trainer.optimizers:  # otherwise torch warns at the epoch's end that a scheduler stepped first
        vars(optimizer)["_opt_called"] = bool(state["state"]["step"])
    load_schedules(trainer.lr_schedulers, state["schedules"], state.get("scheduled"))
    trainer.published.metrics.update(state["metrics"])
    trainer.precision_plugin.load_state_dict(state["precision"])
    trainer.state.load_state_dict(state["state"])
    at_first = [feed.at_first for feed in _feeds(trainer)]
    rebuild_feeds(trainer)
    for feed, first in zip(_feeds(trainer), at_first, strict=False):
        feed.at_first = first
    if trainer.world.size == 1 or trainer.use_distributed_sampler:  # otherwise each rank has an order of its own
        trainer.train_feed.order_before = state.get("order", "")
        for feed, drawn in zip(_feeds(trainer), state.get("drawn", ()), strict=False):
            feed.drawn = drawn
    if trainer.state.batch and "order" in state and bool(state["order"]) != trainer.train_feed.exact_position:
        trainer.print(
            "the checkpoint's epoch was read from another kind of loader than "
            f"{type(trainer.train_dataloader).__name__}: some of its samples are trained twice, and others not at all"
        )
    own_accumulation = trainer.accumulate_grad_batches
    trainer.taken_up = (state.get("global_batch", 0), state.get("accumulate", own_accumulation), own_accumulation)
    restore_rank_states(trainer, state["ranks"], rank=rank)
    for feed in _feeds(trainer):
        feed.place_sampler(trainer.state.epoch)
    if trainer.state.step and (lost := trainer.train_feed.lost_generators(within=trainer.state.batch > 0)):
        trainer.print(
            f"loader processes draw from generators of the dataset ({', '.join(lost)}), whose state is lost: random "
            "numbers differ from a run without the interruption. Draw from torch's, numpy's or python's global "
            "generator, which is seeded for each batch"
        )
    before, trained = trainer.state.shared_by, trainer.state.batch
    recount_batches(trainer)
    _end_shortened_epoch(trainer, trained, state.get("batches", 0))
    if rank is None or before != trainer.world.size:
        _report_lost_position(trainer, before)
    elif trainer.train_feed.reads_again:
        _report_reading(trainer)
    known = _by_key(trainer.callbacks)
    if unused := [key for key, kept in state["callbacks"].items() if kept and key not in known]:
        trainer.print(f"the checkpoint has state of {', '.join(unused)}, and this run has no such callback")
    for key, callback in known.items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    if trainer.datamodule is not None and state["datamodule"]:
        trainer.datamodule.load_state_dict(state["datamodule"])
    index = trainer.world.rank if rank is None else rank
    if index < len(state["ranks"]):
        RandomState.of(state["ranks"][index]["random"]).restore()
        set_generators(trainer.own_generators, state["ranks"][index].get("own", {}))


def _global_batch(trainer: Trainer) -> int:
    """Return the number of samples per update; 0 if unknown."""
    whole = int(getattr(trainer.train_feed, "global_batch", 0)) * trainer.accumulate_grad_batches
    return whole if trainer.strategy.steps_globally else whole // max(1, trainer.state.ranks)


def report_global_batch(trainer: Trainer) -> None:
    """Print a change of the global batch since the checkpoint; called after the hooks of the epoch's start, once.

    At the begin of an epoch, a changed accumulation may also be the run's own schedule, and is not reported.

    Args:
        trainer: of a resumed fit.
    """
    if trainer.taken_up is None:
        return
    (before, accumulated, own_accumulation), trainer.taken_up = trainer.taken_up, None
    now, accumulate = _global_batch(trainer), trainer.accumulate_grad_batches
    same_batch = before // accumulated == now // accumulate
    changed = accumulate == own_accumulation != accumulated
    if trainer.state.samples or not same_batch or changed:
        _print_global_batch(trainer, before)
    if changed and not (before and now):
        trainer.print(
            f"each update has {accumulate} batches of each rank from here on, where it had {accumulated} before"
        )


def _print_global_batch(trainer: Trainer, before: int) -> None:
    """Print the global batch if it differs from the checkpoint's; a change of the number of ranks alone keeps it."""
    now = _global_batch(trainer)
    if not before or not now or now == before:
        return
    why = (
        f"a global batch is batch_size x accumulate_grad_batches x the {trainer.state.ranks} "
        f"rank{'s' if trainer.state.ranks > 1 else ''} that the run began with, for any number of ranks now"
    )
    if not trainer.strategy.steps_globally:
        why = "an update has batch_size x accumulate_grad_batches samples of a single worker"
    trainer.print(
        f"each update has {now} samples from here on, where it had {before} before the checkpoint: {why}; learning "
        "rates are not adapted"
    )


def recount_batches(trainer: Trainer) -> None:
    """Recount the epoch's batches and the trained batches, if ranks, accumulation or batch size have changed.

    The number of ranks changes between runs and within a run, the accumulation between epochs, the batch size between
    runs.

    Args:
        trainer: with a training feed.
    """
    state, feed = trainer.state, trainer.train_feed
    before = (state.shared_by, state.accumulate, state.together)
    now = (trainer.world.size, trainer.accumulate_grad_batches, feed.global_batch)
    state.shared_by, state.accumulate, state.together = now
    if now == before or not before[1]:
        return
    count_batches(trainer)
    trainer.val_every = validation_interval(trainer)
    batch = feed.batches_before(state.samples, trainer.accumulate_grad_batches)
    if batch is not None:
        state.batch = batch


def _end_shortened_epoch(trainer: Trainer, trained: int, before: int | float) -> None:
    """End an epoch with its validation, if no batch remains because the epoch has fewer batches than before.

    Args:
        trainer: of a resumed fit.
        trained: batches of the epoch that were trained, as counted by the checkpoint's run.
        before: number of batches in that run's epoch.
    """
    state, now = trainer.state, trainer.num_training_batches
    if not (0 < trained < before and 0 < now <= state.batch):
        return
    trainer.print(
        f"epoch {state.epoch} has {now} batches from here on, where it had {before} before the checkpoint, and "
        f"{trained} were trained: it ends here"
    )
    state.validating = state.validating or validation_due_of_end(trainer, trained, before)


def _report_lost_position(trainer: Trainer, before: int) -> None:
    """Report that positions in streams are lost, because a different number of ranks has begun the epoch."""
    if (
        trainer.train_feed.batches_before(trainer.state.samples, trainer.accumulate_grad_batches) is None
        and trainer.state.batch
    ):
        trainer.print(
            f"the checkpoint was written by {before} ranks, and {trainer.world.size} go on: each rank reads from its "
            "own loader, so some samples of this epoch may be trained twice or not at all"
        )


def _report_reading(trainer: Trainer) -> None:
    """Report that a stream without a saved position is read again."""
    if not trainer.state.batch or isinstance(trainer.train_dataloader, Sequence):  # no data, or a list
        return
    trainer.print(
        f"{type(trainer.train_dataloader).__name__} has no state_dict, so its position is unknown: its first "
        f"{trainer.state.batch} batches of this epoch are read again, with the epoch's initial random numbers. The "
        "run goes on exactly if these are the same batches; if their order is drawn from other random "
        "numbers, or between batches, some samples are trained twice and others not at all. A map-style "
        "DataLoader, or a loader with state_dict and load_state_dict, goes on exactly"
    )
