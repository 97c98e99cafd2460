"""Collects the content of a checkpoint from the parts of a run, and starts to write it."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricx import checkpoint
from fabricx.checkpoint import tree
from fabricx.checkpoint.hyperparameters import Form, plain, storable
from fabricx.checkpoint.objects import is_storable
from fabricx.checkpoint.optimizer_numbers import numbered
from fabricx.checkpoint.single_file import OF_HOOKS
from fabricx.consistency.comparison import of_added
from fabricx.consistency.optimizer_changes import not_watched
from fabricx.core.state import Phase
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.distributed.sharding.fsdp_internals import class_before_fsdp
from fabricx.errors import PossibleUserWarning
from fabricx.redaction import masked
from fabricx.session.callback_states import by_key, constructed
from fabricx.session.save_points import check_savable, meet_to_save
from fabricx.session.schedule import delays_stop
from fabricx.session.trained_parameters import changed_since_set_up
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.distributed.world import World
    from fabricx.session.rank_state import RankState
    from fabricx.session.session import Session


def save_checkpoint(
    session: Session, path: Path, *, weights_only: bool, wait: bool = True,
    after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None,
    single_file: bool | None = None,
) -> None:  # fmt: skip
    """Start to write a checkpoint of the run; every rank calls it. `finish_checkpoint` waits for its end.

    Args:
        session: the run's session.
        path: path of the checkpoint.
        weights_only: save no state of optimizers, schedulers, callbacks and data.
        wait: the caller waits until the checkpoint is complete; ranks without a sample do the same.
        after: called on the main rank when the checkpoint is complete; set by callbacks of fabricx.
        failed: called on every rank if the disk was full.
        single_file: write a file instead of a folder; None for the module's `single_file_checkpoints`.

    Raises:
        RanksApart, RanksDisagree, RuntimeError: see `check_savable` and `meet_to_save`.
    """
    if session.world.newcomer:  # the ranks that it will join save the checkpoint
        return
    check_savable(session, weights_only=weights_only)
    if (
        after is None or session.batch.idle_ranks
    ):  # otherwise a callback of fabricx saves, on all ranks in the same step
        meet_to_save(session, path, weights_only=weights_only, wait=wait, single_file=single_file)
    # inference_mode off, also within a validation: the next snapshot could not overwrite inference tensors.
    with (
        session.recorder.within(Span.CHECKPOINT), torch.inference_mode(False), session.gradients.weights_as_stored(),
        not_watched(), contextlib.ExitStack() as weights,
    ):  # fmt: skip
        session.sharding.reshard()  # callbacks change the shards of weights that a validation has gathered
        for callback in session.callbacks:
            weights.enter_context(callback.trained_weights())
        if single_file is None:
            single_file = bool(getattr(session.module, "single_file_checkpoints", False))
        _begin_checkpoint(session, path, weights_only, after, failed, single_file)


def _begin_checkpoint(
    session: Session,
    path: Path,
    weights_only: bool,
    after: Callable[[], None] | None,
    failed: Callable[[], None] | None,
    single_file: bool,
) -> None:
    began = time.monotonic()
    state, added = _content(session, path, weights_only=weights_only)
    manifest = _manifest(session, weights_only=weights_only)

    def full() -> None:
        session.metrics.loggers.event(
            "checkpoint", f"{path} could not be written: the disk is full; delete files to make room", manifest["step"]
        )
        if failed is not None:
            failed()

    def done() -> None:
        session.recorder.event("checkpoint", f"{path} is complete", manifest["step"], seconds=time.monotonic() - began)
        if after is not None:
            after()

    writer = session.checkpoints.writer = session.checkpoints.writer or checkpoint.Writer(
        session.world, session.checkpoints.key
    )
    shown = added if single_file else None
    # Tensors of hooks and of other callbacks may differ between ranks.
    averaging = [key for key, callback in by_key(session.callbacks).items() if callback.keeps_weights]
    common = ["strategy", *(f"callbacks/{tree.escape(key)}" for key in averaging)]
    writer.begin(path, state, manifest, done, full, repeated=after is not None, shown=shown, common=common)


def _content(session: Session, path: Path, *, weights_only: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a checkpoint, and the names of the entries that hooks have added to it; collective."""
    point = session.fault_tolerance.resume_point or (None if weights_only else session.rank_state())
    buffers = {} if point is None else point.buffers
    if buffers and not weights_only and session.window.unfinished and session.strategy.traits.checkpoint_averages:
        session.print(
            f"{path} is saved within an accumulation window, with weights averaged over ranks: a run that resumes from "
            "it repeats the window from the averages, so its weights differ from those of this run. For exact "
            "resumption, save after the last batch of a window"
        )
    kept = session.user_steps.kept
    if buffers and not weights_only and session.window.unfinished and kept is not None and kept.accumulates:
        session.print(
            f"{path} is saved within an accumulation window, whose gradients are added to those that "
            "optimizer_zero_grad has kept: a run that resumes from it adds the window's gradients again. For exact "
            "resumption, save after the last batch of a window"
        )
    session.synchronize(buffers)
    hparams, omitted = storable(session.module.hparams, is_storable)
    state: dict[str, Any] = {
        "strategy": session.strategy.state_dict(session.module, [] if weights_only else session.optimizers),
        "hparams": hparams,
        "hparams_omitted": omitted,
        "hparams_form": Form.of(session.module).note(),
        "state": session.state.state_dict(),
    }
    if session.datamodule is not None and _has_objects(session.datamodule.hparams):
        state["datamodule_hparams"] = masked(storable(session.datamodule.hparams, is_storable)[0])
    state["strategy"]["module"].update(buffers)
    if point is not None and not weights_only:
        state |= {**point.with_states(run_state(session)), "ranks": _states_of_ranks(session.world, point)}
    known = set(state)
    session.checkpoints.collecting = True
    try:
        with entries_of_hooks(state), session.metrics.not_collecting():
            shown = [name for name in ("optimizer_states", "lr_schedulers") if name in state]
            for hook in session.hooks.on_save_checkpoint:
                hook(state)
            removed = [name for name in shown if name not in state]
    finally:
        session.checkpoints.collecting = False
    if removed:
        session.warn_once(
            "removed states",
            f"on_save_checkpoint has removed {', '.join(map(repr, removed))}, and the checkpoint keeps them, since a "
            "run resumes from them: ModelCheckpoint(save_weights_only=True) saves without them",
        )
    hparams, added_by_hooks = storable(state["hparams"], is_storable)
    omitted = {name: kind for name, kind in omitted.items() if name not in hparams} | added_by_hooks
    if omitted:
        session.warn_once(
            "omitted hyperparameters",
            f"checkpoints omit the hyperparameters {', '.join(f'{name} ({kind})' for name, kind in omitted.items())}: "
            "their weights are in the checkpoint already, or they can't be pickled. Pass them to load_from_checkpoint, "
            "and to save_hyperparameters(ignore=[...])",
            PossibleUserWarning,
        )
    state |= {"hparams": masked(hparams), "hparams_omitted": omitted}
    added = {name: value for name, value in state.items() if name not in known and name != OF_HOOKS}
    _warn_if_lost(session.world, {**added, **state.get(OF_HOOKS, {})})
    return as_part(session.strategy, ModelParallel).whole_state(state), [str(name) for name in added]


def _has_objects(hparams: Mapping[str, Any]) -> bool:
    """Return whether hyperparameters have objects, which the manifest, plain data in JSON, omits."""
    return bool(storable(hparams)[1])


def _manifest(session: Session, *, weights_only: bool) -> dict[str, Any]:
    """Return the description of a checkpoint as plain data; it is readable without the tensors."""
    module_class = class_before_fsdp(session.module)
    manifest: dict[str, Any] = {
        "run": [session.state.run, session.run_dir.name if session.run_dir is not None else ""],
        "step": session.state.step,
        "epoch": session.state.epoch,
        "samples": session.state.samples,
        "world_size": session.world.size,
        "ranks": session.state.ranks,
        "strategy": type(session.strategy).__name__,
        "module": f"{module_class.__module__}.{module_class.__qualname__}",
        "precision": session.options.precision,
        "weights_only": weights_only,
        "layout": as_part(session.strategy, ModelParallel).layout,
        "hparams": masked(plain(session.module.hparams)),
        "configuration": masked(session.trainer.configuration),
    }
    if session.datamodule is not None:
        manifest["datamodule_hparams_form"] = Form.of(session.datamodule).note()
        manifest["datamodule_hparams"] = masked(plain(storable(session.datamodule.hparams)[0]))
        manifest["datamodule_objects"] = _has_objects(session.datamodule.hparams)
    return manifest


@contextlib.contextmanager
def entries_of_hooks(state: dict[str, Any]) -> Iterator[None]:
    """Keep entries that `on_save_checkpoint` adds apart from those of fabricx that have the same name.

    Callbacks' states, which Lightning's checkpoints have under the same name, can be changed and replaced.

    Args:
        state: content of a checkpoint; changed in place, and by the hooks.
    """
    before = {name: value for name, value in state.items() if name != "callbacks"}
    with weights_as_state_dict(state):
        yield
        replaced = {name: state[name] for name, value in before.items() if name in state and state[name] is not value}
        state.update({name: before[name] for name in replaced})
    if replaced:
        state[OF_HOOKS] = replaced


@contextlib.contextmanager
def weights_as_state_dict(state: dict[str, Any]) -> Iterator[None]:
    """Add entries during hooks by which hooks of Lightning read them: position, hyperparameters, weights, optimizers.

    Hooks may change or replace hyperparameters and weights, and remove hyperparameters. States of optimizers and
    schedules are copies to read. Entries that were saved by `entries_of_hooks` have their names again.

    Args:
        state: content of a checkpoint; changed in place, and by the hooks.
    """
    weights = state["state_dict"] = state["strategy"]["module"]
    position = {"epoch": state["state"]["epoch"], "global_step": state["state"]["step"]} if "state" in state else {}
    hparams = state.get("hparams")
    state.update(position)
    copies: dict[str, Any] = {}
    if "schedules" in state and "optimizer_states" not in state:
        copies["optimizer_states"] = [numbered(saved) for saved in state["strategy"].get("optimizers", [])]
        copies["lr_schedulers"] = copy.deepcopy(list(state["schedules"]))
    state.update(copies)
    if hparams is not None:
        state["hyper_parameters"] = hparams
    of_hooks = state.get(OF_HOOKS, {})
    hidden = {name: state[name] for name in of_hooks if name in state}
    state.update(of_hooks)
    try:
        yield
    except KeyError as error:
        if error.args == ("loops",):
            error.add_note(
                "checkpoints of fabricx have no counters of Lightning's loops: read checkpoint['epoch'] and "
                "checkpoint['global_step']. A resumed run continues at the next batch by itself; code that skips "
                "batches would skip them twice"
            )
        raise
    state.update(hidden)
    for name in [*position, *(name for name, value in copies.items() if state.get(name) is value)]:
        state.pop(name, None)
    if hparams is not None:
        state["hparams"] = state.pop("hyper_parameters", None) or {}
    if (changed := state.pop("state_dict", weights)) is not weights:
        state["strategy"]["module"] = changed


def _states_of_ranks(world: World, point: RankState) -> list[dict[str, Any]]:
    """Return the states of all data ranks, on the main rank; a checkpoint has its plain data.

    Ranks that compute a share together have the same random numbers.
    """
    states = world.gather_objects_on_main(point.state_dict() if world.represents else None)
    return [state for state in states if state is not None]


def _warn_if_lost(world: World, added: Mapping[str, Any]) -> None:
    """Warn if hooks add different values on other ranks: only those of rank 0 are saved; every rank calls it."""
    if not world.all_reduce(torch.tensor(float(bool(added)), device=world.device), "max"):
        return
    by_rank = world.gather_objects(of_added(added)) if world.size > 1 else []
    names = sorted({str(name) for other in by_rank for name in other if other[name] != by_rank[0].get(name)})
    if names and world.main_rank:
        warnings.warn(
            f"on_save_checkpoint adds values that differ between ranks ({', '.join(names)}), and a checkpoint stores "
            "those of rank 0 only: gather the values of all ranks in on_save_checkpoint, by self.all_gather or "
            "torch.distributed.all_gather_object, and select this rank's in on_load_checkpoint",
            stacklevel=2,
        )


def run_state(session: Session) -> dict[str, Any]:
    """Return the resume state that all ranks share, without weights, as plain data and tensors.

    Args:
        session: session of a fit.
    """
    return {
        "state": session.state.state_dict(),
        "global_batch": global_batch(session),
        "accumulate": session.options.accumulate_grad_batches,
        "batches": session.data.batches.training,
        "created_in": list(session.data.created.epochs),
        "created_from": list(session.data.created.states),
        "order": ""
        if session.data.train_feed is None
        else session.data.train_feed.order or session.data.train_feed.order_before,
        "items": "" if session.data.train_feed is None else session.data.train_feed.chosen,
        "drawn": [feed.drawn for feed in session.data.feeds],
        "schedules": [schedule.scheduler.state_dict() for schedule in session.lr_schedulers],
        "scheduled": [schedule.described for schedule in session.lr_schedulers],
        # For a scheduler that monitors a metric at the epoch's end. Metrics of the sanity check are discarded.
        "metrics": {} if session.state.phase is Phase.SANITY else dict(session.metrics.published.metrics),
        "logged": {} if session.state.phase is Phase.SANITY else dict(session.metrics.published.logged),
        "precision": session.precision.state_dict(),
        "delayed_stop": (session.stop_requests.callbacks.reason or "") if delays_stop(session) else "",
        "trained_since": changed_since_set_up(session),
        "callbacks": {key: callback.state_dict() for key, callback in by_key(session.callbacks).items()},
        "callback_arguments": {key: constructed(callback) for key, callback in by_key(session.callbacks).items()},
        "datamodule": session.datamodule.state_dict() if session.datamodule is not None else {},
    }


def global_batch(session: Session) -> int:
    """Return the number of samples per update; 0 if unknown.

    Args:
        session: this rank's session.
    """
    whole = int(getattr(session.data.train_feed, "global_batch", 0)) * session.options.accumulate_grad_batches
    return whole if session.serving.global_updates else whole // max(1, session.state.ranks)
