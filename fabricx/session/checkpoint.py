"""Resumes a run from a checkpoint, and reports what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer

from fabricx import checkpoint
from fabricx.core.hook_calls.hooks import overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.module_state.packed_attributes import unpacked
from fabricx.core.module_state.rng import RandomState
from fabricx.core.optimizers import load_schedules
from fabricx.core.state import Phase
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.data.data_state import set_generators
from fabricx.errors import CheckpointError
from fabricx.session.callback_states import as_saved, check_same_number, with_shards
from fabricx.session.rank_state import restore_rank_states
from fabricx.session.same_parameters import same_parameters
from fabricx.session.saving import global_batch, weights_as_state_dict
from fabricx.session.schedule import validation_due_after_shortening
from fabricx.session.trained_parameters import report_changes, restore_changes
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.session.session import Session

_OF_SEVERAL_RANKS: Final = {"FaultRecovery"}  # callbacks that the Trainer adds itself, unless a single rank trains
_NEEDED: Final = ("state", "schedules", "metrics", "precision", "callbacks", "datamodule", "ranks")
# Entries of Lightning's checkpoints that fabricx does not read.
_NOT_RESTORED: Final = ("optimizer_states", "lr_schedulers", "loops")


def finish_checkpoint(session: Session) -> bool:
    """Wait until no checkpoint is being written; return whether the newest is complete. All ranks call it.

    Args:
        session: the run's session.

    Raises:
        CheckpointError: the checkpoint was not written, for another reason than a full disk.
    """
    if session.checkpoints.writer is None:
        return True
    try:
        with session.recorder.within(Span.CHECKPOINT):
            return session.checkpoints.writer.finish()
    finally:
        if session.state.phase is Phase.IDLE:  # no run is in progress that would close the writer
            session.checkpoints.close()


def restore_requested(session: Session, *, weights_only: bool = False) -> None:
    """Load the checkpoint with which the run was started, if any.

    Args:
        session: session with module, optimizers and feeds.
        weights_only: load only the weights, for an evaluation.

    Raises:
        ValueError: training can't continue from it, or `max_epochs` is reached already.
    """
    if session.checkpoints.ckpt_path is not None:
        restore(session, session.checkpoints.ckpt_path, weights_only=weights_only)
        completed, limit = session.state.epoch + session.state.closing, session.options.max_epochs
        if not weights_only and limit not in (None, -1) and completed > limit:
            raise ValueError(
                f"{session.checkpoints.ckpt_path} was written after {completed} epochs, and max_epochs={limit}: set "
                f"max_epochs to more than {completed} to continue"
            )


def load_imported_weights(session: Session) -> None:
    """Load the weights with which a training begins, if its checkpoint was imported from another program.

    Called before the strategy copies weights: a new run begins at step 0, with these weights on all ranks.

    Args:
        session: this rank's session; its strategy has created the parameters of a module on the meta device.
    """
    path = session.checkpoints.ckpt_path
    if path is None or session.world.newcomer:  # a newcomer receives the weights of the other ranks
        return
    imported = vars(checkpoint.read_foreign(path, "meta")) if checkpoint.is_foreign(path) else _imported(path)
    if imported is None:
        return
    restore(session, path, weights_only=True)
    session.checkpoints.ckpt_path = None
    session.print(
        f"training begins at step 0 with the weights of {path} ({imported['source']}, epoch {imported['epoch']}, step "
        f"{imported['step']}); states of its optimizers, schedules, callbacks and data are not restored"
    )


def _imported(path: Path) -> Mapping[str, Any] | None:
    """Return the origin of a checkpoint that `fabricx checkpoint import` has written; None for other checkpoints."""
    imported = checkpoint.read_manifest(path).get("imported")
    return imported if isinstance(imported, dict) else None


def restore(session: Session, path: Path, *, weights_only: bool) -> None:
    """Load a checkpoint into a run: the whole state for training, or the weights for evaluation.

    Args:
        session: session with module, optimizers and feeds.
        path: verified by the process that has chosen the checkpoint, before it started workers.
        weights_only: load the weights only.

    Raises:
        CheckpointError: the checkpoint lacks state that training needs, or `on_load_checkpoint` sets state that is not
            restored.
    """
    # It was verified when it was chosen, before any process started.
    from fabricx.checkpoint.reader import load_weights, weights_of

    state = checkpoint.load(
        path, session.world.device, session.sharding.load_targets(),
        callbacks=with_shards(session.callbacks), verified=True, trusted=session.checkpoints.trusted,
        key=session.checkpoints.key, plugin=session.trainer.checkpoint_io,
    )  # fmt: skip
    weights_of(state, path)  # an error if there are none
    state = as_part(session.strategy, ModelParallel).own_state(state)
    kept = contextlib.nullcontext() if weights_only else same_parameters(session.module, keep_layers=False)
    with kept, weights_as_state_dict(state):
        before = {name: _comparable(state.get(name)) for name in _NOT_RESTORED}
        for hook in session.hooks.on_load_checkpoint:
            hook(state)
        replaced = [name for name, value in before.items() if _comparable(state.get(name)) != value]
    if weights_only:
        load_weights(session.module, weights_of(state, path), path, strict=session.module.strict_loading is not False)
        return
    if "schedules" not in state:
        raise CheckpointError(
            f"{path} has the weights only: it can be evaluated, but training can't continue from it. To begin a new "
            "run with its weights: Module.load_from_checkpoint(path)"
        )
    if missing := [part for part in _NEEDED if part not in state]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}, so training can't continue from it. To begin a new run with its "
            "weights: Module.load_from_checkpoint(path)"
        )
    if replaced:
        raise CheckpointError(
            f"on_load_checkpoint has changed {', '.join(map(repr, replaced))} of the checkpoint, and a resumed run "
            "restores its own states of optimizers, schedules and loops. Remove this change; to begin with new "
            "optimizers, do not resume: trainer.fit(Module.load_from_checkpoint(path)); or change optimizer.state and "
            "optimizer.param_groups in on_train_start"
        )
    configured = _hyperparameters(session.optimizers)
    try:
        session.strategy.load_state_dict(state["strategy"], session.module, session.optimizers)
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        raise CheckpointError(
            f"the weights in {path} are not those of the module: {error}\n  to resume, create the module with the "
            "arguments of the checkpoint; to begin a new run of another module with the weights that fit: "
            "Module.load_from_checkpoint(path, strict=False)"
        ) from None
    _report_hyperparameters(session, configured)
    report_changes(session, state)
    state["state"]["attempt"] = state["state"].get("attempt", 0) + 1
    data = session.world.axis("data")
    rank = data.rank if len(state["ranks"]) == data.size else None
    restore_run(session, state, rank=rank, hooked=overrides(session.module, "on_load_checkpoint", ModuleHooks))
    if session.failures.errors and state["ranks"]:  # the same run starts again
        of_rank = state["ranks"][min(data.rank, len(state["ranks"]) - 1)]
        session.fault_tolerance.load_attributes(unpacked(of_rank.get("attributes", [])), others=False)
    session.metrics.loggers.rewind(session.state.step)


def _hyperparameters(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return the numbers with which each parameter group of the optimizers begins."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    numbers = [{name: value for name, value in group.items() if isinstance(value, (int, float))} for group in groups]
    return [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in numbers]


def _report_hyperparameters(session: Session, configured: Sequence[Mapping[str, Any]]) -> None:
    """Print numbers of `configure_optimizers` that the checkpoint has replaced."""
    restored = _hyperparameters(session.optimizers)
    pairs = {
        f"{name}={now[name]} (configured: {value})": None
        for before, now in zip(configured, restored, strict=False)
        for name, value in before.items()
        if name != "initial_lr" and name in now and now[name] != value
    }
    if pairs:
        session.print(
            f"the optimizer continues with the checkpoint's {', '.join(pairs)}; to train with other values, set "
            "them in optimizer.param_groups in on_train_start"
        )


def restore_run(session: Session, state: dict[str, Any], *, rank: int | None, hooked: bool = False) -> None:
    """Restore the run's state, except the weights.

    Args:
        session: session of a fit.
        state: result of `run_state`, with the list of rank states as "ranks".
        rank: index of this rank's state in "ranks"; None if the ranks have changed: metric sums are then merged.
        hooked: the module has changed in `on_load_checkpoint`.
    """
    for optimizer in session.optimizers:  # otherwise torch warns at the epoch's end that a scheduler stepped first
        vars(optimizer)["_opt_called"] = bool(state["state"]["step"])
    load_schedules(session.lr_schedulers, state["schedules"], state.get("scheduled"))
    session.metrics.published.metrics.update(state["metrics"])
    session.metrics.published.logged.update(state.get("logged", {}))  # earlier versions saved none
    session.precision.load_state_dict(state["precision"])
    restore_changes(session, state)
    session.state.load_state_dict(state["state"])
    session.checkpoints.delayed_stop = state.get("delayed_stop", "")
    several = session.data.several_loaders
    created_from = state.get("created_from", (None, None))
    session.data.rebuild(session.world, state.get("created_in"), created_from, state["datamodule"], changed=hooked)
    if several != session.data.several_loaders:  # steps receive the index of the loader
        session.wrap_steps(fits=True)
    if (
        session.world.axis("data").size == 1 or session.options.use_distributed_sampler
    ):  # otherwise each rank has an order of its own
        session.data.train_feed.order_before = state.get("order", "")
        for feed, drawn in zip(session.data.feeds, state.get("drawn", ()), strict=False):
            feed.drawn = drawn
    if session.state.batch and "order" in state and bool(state["order"]) != session.data.train_feed.exact_position:
        session.print(
            "the checkpoint's epoch was read from another kind of loader than "
            f"{type(session.data.train_dataloader).__name__}: some of its samples are trained twice, and others not at "
            "all"
        )
    _report_other_items(session, state.get("items", ""))
    own_accumulation = session.options.accumulate_grad_batches
    session.checkpoints.loaded = (
        state.get("global_batch", 0),
        state.get("accumulate", own_accumulation),
        own_accumulation,
    )
    restore_rank_states(session.module, session.data, session.metrics, session.world, state["ranks"], rank=rank)
    for feed in session.data.feeds:
        feed.place_sampler(session.state.epoch)
    if session.state.step and (lost := session.data.train_feed.lost_generators(within=session.state.batch > 0)):
        session.print(
            f"loader processes draw from generators of the dataset ({', '.join(lost)}), whose state is lost: random "
            "numbers differ from a run without the interruption. Draw from torch's, numpy's or python's global "
            "generator, which is seeded for each batch"
        )
    before, trained = session.state.shared_by, session.state.batch
    recount_batches(session)
    _end_shortened_epoch(session, trained, state.get("batches", 0))
    if rank is None or before != session.world.axis("data").size:
        _report_lost_position(session, before, state["ranks"])
    elif session.data.train_feed.reads_again:
        _report_reading(session)
    known = as_saved(session.callbacks, state.get("callback_arguments", {}))
    check_same_number(known, state["callbacks"])
    _report_unused(session, {key: kept for key, kept in state["callbacks"].items() if kept and key not in known})
    for key, callback in known.items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    index = session.world.axis("data").rank if rank is None else rank
    if index < len(state["ranks"]):
        RandomState.of(state["ranks"][index]["random"]).restore()
        set_generators(session.data.own_generators, state["ranks"][index].get("own", {}))


def _comparable(value: Any) -> Any:
    """Return a copy of a state that differs after a change; tensors, which hooks may write to, are compared by `id`."""
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return repr(value) if plain else id(value)  # NaN is not equal to itself


def _report_other_items(session: Session, before: str) -> None:
    """Report a Subset whose items are not those of the checkpoint's run, such as a split that was drawn anew.

    Args:
        session: this rank's session.
        before: digest of the items in the checkpoint; "" without.
    """
    if session.state.step and before and session.data.train_feed.chosen not in ("", before):
        session.print(
            "the Subset of the training data has other items than that of the checkpoint's run, which may have kept "
            "some of them for its validation: draw a split after fx.seed_everything, or save it"
        )


def _report_unused(session: Session, states: Mapping[str, Any]) -> None:
    """Report states of callbacks that this run doesn't have; without a callback for averages, weights are averages."""
    if not (names := ", ".join(key for key in states if key not in _OF_SEVERAL_RANKS)):
        return
    text = (
        f"the checkpoint has the state of {names}, and this run has no such callback with these arguments: the state "
        "is not used"
    )
    # With "live", the averages are the checkpoint's weights; other callbacks keep averages beside these.
    averaged = {key: kept for key, kept in states.items() if isinstance(kept, Mapping) and "live" in kept}
    averaging = [key for key, kept in averaged.items() if kept.get("averages")]
    if averaging:
        text += (
            f"; the weights of the checkpoint are the averages of {averaging[0]}, and training continues from these "
            "with optimizers of the weights that were averaged: pass the callback to continue as before"
        )
    session.warn_once("unused states", text)


def report_global_batch(session: Session) -> None:
    """Print a change of the global batch since the checkpoint; called after the hooks of the epoch's start, once.

    At the start of an epoch, a changed accumulation may also be the run's own schedule, and is not reported.

    Args:
        session: session of a resumed fit.
    """
    if session.checkpoints.loaded is None:
        return
    (before, accumulated, own_accumulation), session.checkpoints.loaded = session.checkpoints.loaded, None
    now, accumulate = global_batch(session), session.options.accumulate_grad_batches
    same_batch = before // accumulated == now // accumulate
    changed = accumulate == own_accumulation != accumulated
    if session.state.samples or not same_batch or changed:
        _print_global_batch(session, before)
    if changed and not (before and now):
        session.print(f"each update now has {accumulate} batches per rank, and had {accumulated} before the checkpoint")


def _print_global_batch(session: Session, before: int) -> None:
    """Print the global batch if it differs from the checkpoint's; a change of the number of ranks alone keeps it."""
    now = global_batch(session)
    if not before or not now or now == before:
        return
    why = (
        f"a global batch is batch_size x accumulate_grad_batches x the {session.state.ranks} "
        f"rank{'s' if session.state.ranks > 1 else ''} that the run began with, for any number of ranks now"
    )
    if not session.serving.global_updates:
        why = "an update has batch_size x accumulate_grad_batches samples of a single worker"
    batch_size = max(1, _batch_size(session.data.train_dataloader))
    per_batch = max(1, now // batch_size)  # batches of the loader in an update
    keep = f"; to keep {before}, set batch_size={before // per_batch}" if before % per_batch == 0 else ""
    session.print(
        f"each update now has {now} samples, and had {before} before the checkpoint: {why}; learning rates are not "
        f"adapted{keep}"
    )


def _batch_size(loader: object) -> int:
    return int(getattr(loader, "batch_size", None) or 0)


def recount_batches(session: Session) -> None:
    """Recount the epoch's batches; and the trained batches, if ranks, accumulation or batch size have changed.

    The data may be longer or shorter in each epoch. The number of ranks changes between runs and within a run, the
    accumulation between epochs, the batch size between runs.

    Args:
        session: session with a training feed.
    """
    state, feed = session.state, session.data.train_feed
    session.data.count_again(session.world)
    before = (state.shared_by, state.accumulate, state.together)
    now = (session.world.axis("data").size, session.options.accumulate_grad_batches, feed.global_batch)
    state.shared_by, state.accumulate, state.together = now
    if now == before or not before[1]:
        return
    batch = feed.batches_before(state.samples, session.options.accumulate_grad_batches)
    if batch is not None:
        state.batch = batch


def _end_shortened_epoch(session: Session, trained: int, before: int | float) -> None:
    """End an epoch with its validation, if no batch remains because the epoch has fewer batches than before.

    Args:
        session: session of a resumed fit.
        trained: batches of the epoch that were trained, as counted by the checkpoint's run.
        before: number of batches in that run's epoch.
    """
    state, now = session.state, session.data.batches.training
    if not (0 < trained < before and 0 < now <= state.batch):
        return
    session.print(
        f"epoch {state.epoch} now has {now} batches, and had {before} before the checkpoint; {trained} of them were "
        "trained, so the epoch ends here"
    )
    state.validating = state.validating or validation_due_after_shortening(session, trained, before)


def _report_lost_position(session: Session, before: int, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Report that positions in ranks' own data are lost, because a different number of ranks has begun the epoch."""
    feed, state, now = session.data.train_feed, session.state, session.world.axis("data").size
    counted = feed.batches_before(state.samples, session.options.accumulate_grad_batches) is not None
    if counted and session.options.use_distributed_sampler:  # otherwise of the order of a rank, which has changed
        return
    if state.batch:
        state.uncounted = True
        session.print(
            f"the checkpoint was written by {before} ranks, and {now} continue: each rank reads from its own loader, "
            "so some samples of this epoch may be trained twice or not at all"
        )
    elif any("source" in (saved["position"] or ()) for saved in ranks):
        state.uncounted = True
        session.print(
            f"the checkpoint has the states of the loaders of {len(ranks)} ranks, and the run has {now} now: each "
            "loader begins without a state. A loader that continues its data from epoch to epoch trains some samples "
            "twice, and others not at all: resume on as many ranks as before"
        )


def _report_reading(session: Session) -> None:
    """Report that a stream without a saved position is read again, and what its loader processes have lost."""
    loader, state = session.data.train_dataloader, session.state
    if state.step and (state.epoch or not state.batch) and getattr(loader, "persistent_workers", False):
        session.print(
            "loader processes with persistent_workers=True keep random states and attributes of the data set from "
            "earlier epochs, which are lost: if the stream draws random numbers or counts its epochs, its batches "
            "differ from a run without the interruption. Set persistent_workers=False, or use a map-style DataLoader"
        )
    if not state.batch or isinstance(loader, Sequence):  # no data, or a list
        return
    session.print(
        f"{type(loader).__name__} has no state_dict, so its position is unknown: its first "
        f"{state.batch} batches of this epoch are read again, with the epoch's initial random numbers. The "
        "run continues exactly if these are the same batches; if their order is drawn from other random numbers, some "
        "samples are trained twice and others not at all. A map-style DataLoader, or a loader with state_dict and "
        "load_state_dict, continues exactly"
    )
