"""One run on one rank: set-up, loop, teardown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricx.checkpoint import read_manifest
from fabricx.checkpoint.storage import as_path
from fabricx.consistency import comparison
from fabricx.consistency.hook_effects import guard_weights
from fabricx.consistency.shared_settings import share_settings
from fabricx.core import manual_optimization
from fabricx.core.datamodule import DataModule
from fabricx.core.hooks import Hooks, check_hooks, overrides
from fabricx.core.hparams import plain
from fabricx.core.logger import Ending
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.optimizers import OptimizerHandle, need_metrics_each_step, needs_closure, parse_optimizers
from fabricx.core.precision import make_precision
from fabricx.core.rng import seed_everything
from fabricx.core.state import Phase
from fabricx.core.steps import wrap_steps
from fabricx.core.strategy import SPARSE_CLIPPED, sparse_tables
from fabricx.data import to_device
from fabricx.data.setup import load_data
from fabricx.data.shared_memory import note_on
from fabricx.distributed.generations import membership
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.sync_batchnorm import synchronise, synchronised
from fabricx.distributed.world import World
from fabricx.errors import full_disk_costs
from fabricx.fault_tolerance.rank_record import Slot
from fabricx.fault_tolerance.rollback import MemoryCheckpointer
from fabricx.loop import evaluation
from fabricx.loop import fit as loop
from fabricx.metrics.collector import Logbook
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.redaction import masked
from fabricx.scratch import give_multiprocessing_a_folder
from fabricx.telemetry import events as telemetry
from fabricx.telemetry.recorder import NoopRecorder, Results, open_recorder
from fabricx.trainer import provenance
from fabricx.trainer.arguments import described
from fabricx.trainer.result import Outcome

if TYPE_CHECKING:
    from fabricx.trainer.run_request import Job
    from fabricx.trainer.trainer import Trainer


_JOBS = itertools.count()  # every rank of a world runs the same jobs in the same order


def next_job() -> int:
    """Return the number of the next run in this world; every process of it counts alike."""
    return next(_JOBS)


@dataclass
class Overridden:
    """Which methods with a meaning of their own the module overrides, and what follows from it."""

    backward: bool = False
    batch_weight: bool = False
    optimizer_step: bool = False
    optimizer_zero_grad: bool = False
    configure_gradient_clipping: bool = False
    closures: frozenset[int] = frozenset()
    metrics_each_step: bool = False
    ckpt_path: Path | None = None
    manual_steps: dict[int, int] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)  # what ends hooks on the optimizers


def execute(t: Trainer, job: Job, world: World) -> Outcome:
    """Run a job on this rank, from set-up to tear-down."""
    ending: Ending = "failed"
    give_multiprocessing_a_folder()
    try:
        _set_up(t, job, world)
        results = _WORK[job.stage](t, job)
        _call(t.hooks.teardown, job.stage)
        if t.datamodule is not None:
            t.datamodule.teardown(job.stage)
        ending = "interrupted" if t.interrupted else "success"
        return Outcome(results)
    except BaseException as error:
        if note := note_on(error, t.train_dataloader):
            error.add_note(note)
        if t.hooks is not None:
            _call(t.hooks.on_exception, error)
        if t.datamodule is not None:
            t.datamodule.on_exception(error)
        raise
    finally:
        _close(t, ending)


def _call(hook: tuple[Callable[..., Any], ...], *args: Any) -> None:
    for function in hook:
        function(*args)


def _take_weights(t: Trainer) -> None:
    """Take the weights to evaluate with from the checkpoint; without one, from rank 0."""
    t.restore(weights_only=True)
    if t.overridden.ckpt_path is None:
        comparison.share_weights(t.world, t.module)


def _predict(t: Trainer, job: Job) -> list[Any]:
    _take_weights(t)
    by_loader = [t.world.gather_objects(mine) for mine in evaluation.predict(t, t.val_feeds, keep=job.flag)]
    ordered = [evaluation.in_dataset_order(by_rank) for by_rank in by_loader]
    return ordered if t.several_loaders else ordered[0]


def _evaluate(t: Trainer, job: Job) -> list[dict[str, float]]:
    _take_weights(t)
    results = evaluation.evaluate(t, Phase.VALIDATE if job.stage == "validate" else Phase.TEST, t.val_feeds)
    if job.flag and t.is_global_zero:
        t.print(table(results, job.stage))
    return results


_WORK: dict[str, Callable[[Trainer, Job], Any]] = {
    "fit": loop.fit, "validate": _evaluate, "test": _evaluate, "predict": _predict
}  # fmt: skip


def table(results: list[dict[str, float]], title: str) -> str:
    """Return the results of an evaluation as lines of text."""
    names = list(dict.fromkeys(name for found in results for name in found))
    width = max([len(name) for name in names] + [len(title)])
    rows = [f"  {n:<{width}}  " + "  ".join(f"{f[n]:>12.6g}" if n in f else " " * 12 for f in results) for n in names]
    return "\n".join([f"{title}:", *(rows or ["  (nothing was logged)"])])


def _set_up(t: Trainer, job: Job, world: World) -> None:
    """Bring up everything, in the order of the hooks that API.md fixes."""
    t.world = dataclasses.replace(world, job=next_job())
    t.strategy.enter(t.world)
    t.module, t.datamodule = job.module, job.datamodule
    t.state.ranks = (ranks_that_began(job) if job.began_with is None else job.began_with) or t.state.ranks or world.size
    t.state.shared_by = world.size
    _seed(t)
    _backend_flags(t)
    job.module.trainer = t
    if t.datamodule is not None:
        t.datamodule.trainer = t
    _module_callbacks(t)
    t.hooks = Hooks(t, t.module, t.callbacks)
    t.agreement = Agreement(t.world)
    if t.stop_wanted and job.stage == "fit":
        t.stop_wanted = t.stopped = False
    masked([t.configuration, plain(t.module.hparams)])  # notes the secrets: no log line or error shows them
    _open_recorder(t, job)
    _open_loggers(t, job)
    if world.local_rank == 0 and not world.newcomer:
        _if_any(t.datamodule, "prepare_data")
        t.module.prepare_data()
    world.barrier()
    if t.datamodule is not None:
        t.datamodule.setup(job.stage)
    _call(t.hooks.setup, job.stage)
    with t.strategy.building() if job.stage == "fit" else contextlib.nullcontext():
        t.module.configure_model()
    _set_up_model(t, job)


def ranks_that_began(job: Job) -> int:
    """Return with how many ranks the run of a checkpoint began; 0 where it begins now, or that isn't known.

    The length of an epoch follows from it, and the optimizers' schedules are built before the checkpoint is loaded.
    """
    if job.stage != "fit" or job.ckpt_path is None:
        return 0
    return int(read_manifest(as_path(job.ckpt_path)).get("ranks", 0))


def _if_any(owner: Any, name: str) -> None:
    if owner is not None:
        getattr(owner, name)()


def _seed(t: Trainer) -> None:
    """Give all ranks one seed for the data order; what is drawn elsewhere is each rank's own."""
    t.state.seed = t.world.broadcast_object(t.state.seed)
    if t.world.size > 1:
        seed_everything((t.state.seed + t.world.rank) % 2**32)


def _backend_flags(t: Trainer, *, on: bool = True) -> None:
    """Switch on what the run asks of torch, or off again."""
    if t.detect_anomaly:
        torch.autograd.set_detect_anomaly(on)
    if t.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(on, warn_only=t.deterministic == "warn")
    if t.benchmark is not None:
        torch.backends.cudnn.benchmark = t.benchmark and on


def _module_callbacks(t: Trainer) -> None:
    own = t.module.configure_callbacks()
    for callback in own if isinstance(own, (list, tuple)) else [own]:
        check_hooks(callback)
        t.callbacks = [one for one in t.callbacks if type(one) is not type(callback)]
        t.callbacks.append(callback)


def _open_recorder(t: Trainer, job: Job) -> None:
    """Record what this rank does, if the run writes anything; of an evaluation after it, the results."""
    if not t.writes or not t.enable_telemetry or t.run_dir is None:
        return
    if job.stage != "fit":
        if job.stage != "predict" and t.is_global_zero and (t.run_dir / telemetry.FOLDER).is_dir():
            with full_disk_costs("the records of the results"):
                t.recorder = Results(t.run_dir)
    else:
        known = {
            "strategy": type(t.strategy).__name__, "servers": t.strategy.servers,
            "synchronous": t.strategy.traits.synchronous and t.strategy.dealer is None,
            "device": str(t.world.device), "precision": t.precision, "attempt": t.state.attempt,
        }  # fmt: skip
        with full_disk_costs("the records of this rank"):
            t.recorder = open_recorder(t.run_dir, t.world, t.strategy, t.log_settings, **known)


def _open_loggers(t: Trainer, job: Job) -> None:
    if job.stage == "predict" or not t.is_global_zero or t.fast_dev_run:
        return
    assert t.run_dir is not None
    if t.loggers or job.stage == "fit":
        t.run_dir.mkdir(parents=True, exist_ok=True)
    t.logger_dispatcher = LoggerDispatcher(t.loggers, t.run_dir, t.recorder)
    if job.stage != "fit":
        return
    provenance.write(t.run_dir, None)
    made: dict[str, Any] = {"trainer": t.arguments}
    for name, one in (("module", t.module), ("datamodule", t.datamodule)):
        if one is not None:
            made[name] = {"class": type(one).__name__, **described(one.hparams)}
    provenance.write_arguments(t.run_dir, made)
    for name in ("config.yaml", "arguments.yaml", "command.txt"):
        if (file := t.run_dir / name).is_file():
            text = (file.stem, file.read_text())
            t.logger_dispatcher.each(lambda logger, text=text: logger.log_text(*text))  # type: ignore[misc]
    given = [
        owner.hparams
        for owner in (t.module, t.datamodule)
        if owner is not None and owner.__dict__.get("_log_hyperparams")
    ]
    params = {name: value for hparams in given for name, value in plain(hparams).items()}
    if params:
        t.logger_dispatcher.each(lambda logger: logger.log_hyperparams(masked(params)))


def _set_up_model(t: Trainer, job: Job) -> None:
    module = t.module
    t.precision_plugin = make_precision(t.precision, t.world.device)
    t.precision_plugin.convert(module)
    if t.sync_batchnorm and (t.world.size > 1 or t.world.newcomer):
        synchronise(module, t.world.device)
    t.strategy.place(module)
    _compile(t)
    own: dict[str, Any] = {
        name: overrides(module, name, ModuleHooks)
        for name in ("backward", "batch_weight", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    }
    t.overridden = Overridden(**own, ckpt_path=as_path(job.ckpt_path) if job.ckpt_path else None)
    t.bring = _transfer(t)
    load_data(t, job)
    _check_ranks_together(t, job)
    if t.train_feed is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        t.recorder.knows(loader_processes=t.train_feed.processes, cores=max(1, cores // max(1, t.world.local_size)))
    if job.stage != "fit":
        comparison.compare(t.world, comparison.of_module(module) | comparison.of_data(None, t.val_feeds))
        wrap_steps(t)
        t.attach_log(None)
        return
    mine = membership()
    t.members = mine if mine.changes else None
    if mine.folder and t.strategy.dealer is None and not (t.members is not None and t.strategy.traits.alike):
        every = next((c.copy_every_n_steps for c in t.callbacks if c.copy_every_n_steps), None)
        t.memory_checkpointer = MemoryCheckpointer(t.world, t.strategy.replicas_of, every)
    elif t.members is not None and t.strategy.dealer is None:
        t.slot = Slot(mine.folder, mine.worker)
    _check_options(t)
    data = comparison.of_data(t.train_feed, t.val_feeds)
    comparison.compare(t.world, comparison.of_training(t) | comparison.of_module(module) | data)
    t.strategy.setup(module, several_backwards=not module.automatic_optimization)
    wrap_steps(t)
    if t.state.step and job.ckpt_path is None:
        t.print(
            f"this run goes on after {t.state.step} steps of an earlier fit with its weights, and with new optimizers "
            "and schedules: ckpt_path='last' goes on with those of a checkpoint"
        )
    t.logbook = t.train_logbook = Logbook(t.strategy, training=True, weigh=t.weigh)
    t.attach_log(t.logbook)
    t.training_step = t.strategy.wrap_step(t.training_step)
    t.optimizers, t.lr_schedulers = parse_optimizers(module.configure_optimizers())
    comparison.compare(t.world, comparison.of_optimizers(module, t.optimizers, t.lr_schedulers))
    t.overridden.metrics_each_step = need_metrics_each_step(t)
    t.overridden.closures = frozenset(id(optimizer) for optimizer in t.optimizers if needs_closure(optimizer))
    t.closures = bool(t.overridden.closures)
    if t.closures and t.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={t.accumulate_grad_batches}: an optimizer that computes the loss again, such as "
            "LBFGS, can do so for one batch only: leave it out, and take a larger batch_size"
        )
    t.strategy.take_over(t.optimizers)
    guard_weights(t)
    t.optimizer_handles = [OptimizerHandle(optimizer, t) for optimizer in t.optimizers]
    if not module.automatic_optimization:
        manual_optimization.watch_gradients(t)
    share_settings(t)
    if module.example_input_array is not None:
        t.logger_dispatcher.each(lambda logger: logger.log_graph(module, module.example_input_array))


def _check_options(t: Trainer) -> None:
    """Refuse options that the module can't be trained with, before training."""
    if not t.module.automatic_optimization:
        manual_optimization.check_options(t)
    if t.gradient_clip_val is not None and t.gradient_clip_algorithm == "norm" and t.strategy.norm_clipping_refused:
        raise ValueError(t.strategy.norm_clipping_refused)
    if t.overridden.batch_weight and t.world.size > 1 and t.strategy.batch_weight_refused:
        raise ValueError(t.strategy.batch_weight_refused)
    clips = t.gradient_clip_val is not None and not t.overridden.configure_gradient_clipping
    if clips and sparse_tables(t.module):
        raise ValueError(SPARSE_CLIPPED)


def _check_ranks_together(t: Trainer, job: Job) -> None:
    """Refuse data of which a rank sometimes has none, where the others can't compute without it."""
    if job.stage != "fit" or t.world.size == 1 or t.world.newcomer or not synchronised(t.module):
        return
    if t.train_feed.leaves_out(t.accumulate_grad_batches):
        remedy = "set drop_last=True on the DataLoader, or take another batch_size"
        if not t.train_feed.exact_position:
            remedy = "set limit_train_batches to the number of batches that each rank has at least"
        raise ValueError(
            "SyncBatchNorm needs a sample on each rank in each batch, and at the end of an epoch some of "
            f"{t.world.size} ranks may have none: {remedy}"
        )


def _compile(t: Trainer) -> None:
    if not t.compile:
        return
    options = dict(t.compile) if isinstance(t.compile, Mapping) else {}
    # In place: names in the state dict stay. A module without a forward of its own has children that are called.
    own_forward = type(t.module).forward is not nn.Module.forward
    for part in [t.module] if own_forward else list(t.module.children()):
        part.compile(**options)


def _transfer(t: Trainer) -> Callable[[Any, int], Any] | None:
    """Return what brings a batch to the device; None where nothing has to be done."""
    owners = [owner for owner in (t.datamodule, t.module) if owner is not None]

    def own(name: str) -> Callable[..., Any] | None:
        for owner in owners:
            contract = DataModule if isinstance(owner, DataModule) else ModuleHooks
            if overrides(owner, name, contract):
                found: Callable[..., Any] = getattr(owner, name)
                return found
        return None

    before, move, after = (
        own("on_before_batch_transfer"),
        own("transfer_batch_to_device"),
        own("on_after_batch_transfer"),
    )
    convert, device = t.precision_plugin.convert_batch(), t.world.device
    if device.type == "cpu" and not (before or move or after or convert):
        return None  # it is there already

    def bring(batch: Any, loader: int) -> Any:
        batch = before(batch, loader) if before else batch
        batch = move(batch, device, loader) if move else to_device(batch, device)
        batch = convert(batch) if convert else batch
        return after(batch, loader) if after else batch

    return bring


def _close(t: Trainer, ending: Ending) -> None:
    """Give everything back, whatever has happened."""
    with _all_of_them() as attempt:
        if t.agreement is not None:
            attempt(t.agreement.close)
        if t.writer is not None:
            attempt(t.writer.close)
        for undo in t.overridden.undo if t.overridden is not None else ():
            attempt(undo)
        attempt(functools.partial(t.logger_dispatcher.close, ending))
        attempt(functools.partial(t.recorder.close, ending))
        attempt(t.strategy.teardown)
    t.logger_dispatcher, t.recorder = LoggerDispatcher(), NoopRecorder()
    t.agreement = t.writer = t.shared = None
    t.state.phase = Phase.IDLE
    if t.module is not None:
        t.attach_log(None)
    _backend_flags(t, on=False)


@contextlib.contextmanager
def _all_of_them() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Try each of several things; the first error is raised when all have been tried."""
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]
