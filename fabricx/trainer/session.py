"""Execution of a job on a rank: set-up, loop, teardown."""

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
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.sync_batchnorm import synchronise, synchronised
from fabricx.distributed.world import World
from fabricx.errors import full_disk_costs
from fabricx.fault_tolerance import fault_tolerance
from fabricx.loop import evaluation
from fabricx.loop import fit_asynchronous as asynchronous
from fabricx.loop.fit import fit, train_batches
from fabricx.metrics.collector import Logbook
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.metrics.objects import metric_objects
from fabricx.redaction import masked
from fabricx.scratch import set_multiprocessing_folder
from fabricx.telemetry import events as telemetry
from fabricx.telemetry.recorder import NoopRecorder, Results, open_recorder
from fabricx.trainer import provenance
from fabricx.trainer.arguments import described
from fabricx.trainer.result import Outcome

if TYPE_CHECKING:
    from fabricx.trainer.run_request import Job
    from fabricx.trainer.trainer import Trainer


_JOBS = itertools.count()  # all ranks of a world run the same jobs in the same order


def next_job() -> int:
    """Return the number of the next run in this world; all its processes count the same."""
    return next(_JOBS)


@dataclass
class Overridden:
    """Overridden methods of the module and other properties of a run that change how batches are trained.

    Attributes:
        backward, batch_weight, optimizer_step, optimizer_zero_grad, configure_gradient_clipping: whether the module
            overrides the method.
        closures: ids of the optimizers that need a closure.
        metrics_each_step: whether a schedule reads a metric after each weight update.
        ckpt_path: checkpoint that the run loads; None without a checkpoint.
        manual_steps: steps of each optimizer (by id) in the current batch of manual optimization.
        undo: functions that remove the hooks on the optimizers when the run ends.
    """

    backward: bool = False
    batch_weight: bool = False
    optimizer_step: bool = False
    optimizer_zero_grad: bool = False
    configure_gradient_clipping: bool = False
    closures: frozenset[int] = frozenset()
    metrics_each_step: bool = False
    ckpt_path: Path | None = None
    manual_steps: dict[int, int] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)


def execute(trainer: Trainer, job: Job, world: World) -> Outcome:
    """Run a job on this rank, from set-up to teardown.

    Args:
        trainer: the trainer of this rank.
        job: validated.
        world: has joined its process group; a newcomer joins later.

    Returns:
        the results of the job, on this rank.
    """
    ending: Ending = "failed"
    set_multiprocessing_folder()
    try:
        _set_up(trainer, job, world)
        results = _work(trainer, job)()
        _call(trainer.hooks.teardown, job.stage)
        if trainer.datamodule is not None:
            trainer.datamodule.teardown(job.stage)
        ending = "interrupted" if trainer.interrupted else "success"
        return Outcome(results)
    except BaseException as error:
        if note := note_on(error, trainer.train_dataloader):
            error.add_note(note)
        if trainer.hooks is not None:
            _call(trainer.hooks.on_exception, error)
        if trainer.datamodule is not None:
            trainer.datamodule.on_exception(error)
        raise
    finally:
        _close(trainer, ending)


def _call(hook: tuple[Callable[..., Any], ...], *args: Any) -> None:
    for function in hook:
        function(*args)


def _load_weights(trainer: Trainer) -> None:
    """Load the weights to evaluate from the checkpoint; without a checkpoint, copy rank 0's weights to all ranks."""
    trainer.restore(weights_only=True)
    if trainer.overridden.ckpt_path is None:
        comparison.share_weights(trainer.world, trainer.module)


def _predict(trainer: Trainer, job: Job) -> list[Any]:
    _load_weights(trainer)
    by_loader = [
        trainer.world.gather_objects(outputs)
        for outputs in evaluation.predict(trainer, trainer.val_feeds, keep=job.flag)
    ]
    ordered = [evaluation.in_dataset_order(by_rank) for by_rank in by_loader]
    return ordered if trainer.several_loaders else ordered[0]


def _evaluate(trainer: Trainer, job: Job) -> list[dict[str, float]]:
    _load_weights(trainer)
    results = evaluation.evaluate(trainer, Phase.VALIDATE if job.stage == "validate" else Phase.TEST, trainer.val_feeds)
    if job.flag and trainer.is_global_zero:
        trainer.print(table(results, job.stage))
    return results


def _work(trainer: Trainer, job: Job) -> Callable[[], Any]:
    """Return the function that executes a job; for `fit`, the synchronous or the asynchronous training loop."""
    if job.stage == "fit":
        batches = train_batches if trainer.strategy.dealer is None else asynchronous.train_batches
        return functools.partial(fit, trainer, batches)
    return functools.partial(_predict if job.stage == "predict" else _evaluate, trainer, job)


def table(results: list[dict[str, float]], title: str) -> str:
    """Return the results of an evaluation as lines of text.

    Args:
        results: metrics of each loader, by name.
        title: first line, without the colon.
    """
    names = list(dict.fromkeys(name for metrics in results for name in metrics))
    width = max([len(name) for name in names] + [len(title)])
    rows = [f"  {n:<{width}}  " + "  ".join(f"{m[n]:>12.6g}" if n in m else " " * 12 for m in results) for n in names]
    return "\n".join([f"{title}:", *(rows or ["  (nothing was logged)"])])


def _set_up(trainer: Trainer, job: Job, world: World) -> None:
    """Set up a run, in the order of `core/hooks.md`."""
    trainer.world = dataclasses.replace(world, job=next_job())
    trainer.strategy.enter(trainer.world)
    trainer.module, trainer.datamodule = job.module, job.datamodule
    trainer.state.ranks = (
        (ranks_that_began(job) if job.began_with is None else job.began_with) or trainer.state.ranks or world.size
    )
    trainer.state.shared_by = world.size
    _seed(trainer)
    _backend_flags(trainer)
    job.module.trainer = trainer
    if trainer.datamodule is not None:
        trainer.datamodule.trainer = trainer
    _module_callbacks(trainer)
    trainer.hooks = Hooks(trainer, trainer.module, trainer.callbacks)
    trainer.agreement = Agreement(trainer.world)
    if trainer.stop_wanted and job.stage == "fit":
        trainer.stop_wanted = trainer.stopped = False
    masked([trainer.configuration, plain(trainer.module.hparams)])  # registers secrets: logs and errors mask them
    _open_recorder(trainer, job)
    _open_loggers(trainer, job)
    if world.local_rank == 0 and not world.newcomer:
        _call_if_present(trainer.datamodule, "prepare_data")
        trainer.module.prepare_data()
    world.barrier()
    if trainer.datamodule is not None:
        trainer.datamodule.setup(job.stage)
    _call(trainer.hooks.setup, job.stage)
    with trainer.strategy.building() if job.stage == "fit" else contextlib.nullcontext():
        trainer.module.configure_model()
    _set_up_model(trainer, job)


def ranks_that_began(job: Job) -> int:
    """Return the number of ranks with which the run of a checkpoint began; 0 without a checkpoint or without a record.

    It determines the length of an epoch, which the schedules of the optimizers need before the checkpoint is loaded.

    Args:
        job: its path of a checkpoint is resolved.
    """
    if job.stage != "fit" or job.ckpt_path is None:
        return 0
    return int(read_manifest(as_path(job.ckpt_path)).get("ranks", 0))


def _call_if_present(owner: Any, name: str) -> None:
    if owner is not None:
        getattr(owner, name)()


def _seed(trainer: Trainer) -> None:
    """Share the seed of the data order with all ranks; seed the other random generators differently on each rank."""
    trainer.state.seed = trainer.world.broadcast_object(trainer.state.seed)
    if trainer.world.size > 1:
        seed_everything((trainer.state.seed + trainer.world.rank) % 2**32)


def _backend_flags(trainer: Trainer, *, on: bool = True) -> None:
    """Set or reset the global flags of torch that the options of the run require."""
    if trainer.detect_anomaly:
        torch.autograd.set_detect_anomaly(on)
    if trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(on, warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = trainer.benchmark and on


def _module_callbacks(trainer: Trainer) -> None:
    configured = trainer.module.configure_callbacks()
    for callback in configured if isinstance(configured, (list, tuple)) else [configured]:
        check_hooks(callback)
        trainer.callbacks = [other for other in trainer.callbacks if type(other) is not type(callback)]
        trainer.callbacks.append(callback)


def _open_recorder(trainer: Trainer, job: Job) -> None:
    """Open the telemetry of this rank, if the run writes files; an evaluation records only its results."""
    if not trainer.writes or not trainer.enable_telemetry or trainer.run_dir is None:
        return
    if job.stage != "fit":
        if job.stage != "predict" and trainer.is_global_zero and (trainer.run_dir / telemetry.FOLDER).is_dir():
            with full_disk_costs("the records of the results"):
                trainer.recorder = Results(trainer.run_dir)
    else:
        attributes = {
            "strategy": type(trainer.strategy).__name__, "servers": trainer.strategy.servers,
            "synchronous": trainer.strategy.traits.synchronous and trainer.strategy.dealer is None,
            "device": str(trainer.world.device), "precision": trainer.precision, "attempt": trainer.state.attempt,
        }  # fmt: skip
        with full_disk_costs("the records of this rank"):
            trainer.recorder = open_recorder(
                trainer.run_dir, trainer.world, trainer.strategy, trainer.log_settings, **attributes
            )


def _open_loggers(trainer: Trainer, job: Job) -> None:
    if job.stage == "predict" or not trainer.is_global_zero or trainer.fast_dev_run:
        return
    assert trainer.run_dir is not None
    if trainer.loggers or job.stage == "fit":
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
    trainer.logger_dispatcher = LoggerDispatcher(trainer.loggers, trainer.run_dir, trainer.recorder)
    if job.stage != "fit":
        return
    provenance.write(trainer.run_dir, None)
    arguments: dict[str, Any] = {"trainer": trainer.arguments}
    for name, owner in (("module", trainer.module), ("datamodule", trainer.datamodule)):
        if owner is not None:
            arguments[name] = {"class": type(owner).__name__, **described(owner.hparams)}
    provenance.write_arguments(trainer.run_dir, arguments)
    for name in ("config.yaml", "arguments.yaml", "command.txt"):
        if (file := trainer.run_dir / name).is_file():
            text = (file.stem, file.read_text())
            trainer.logger_dispatcher.each(lambda logger, text=text: logger.log_text(*text))  # type: ignore[misc]
    hparams_to_log = [
        owner.hparams
        for owner in (trainer.module, trainer.datamodule)
        if owner is not None and owner.__dict__.get("_log_hyperparams")
    ]
    params = {name: value for hparams in hparams_to_log for name, value in plain(hparams).items()}
    if params:
        trainer.logger_dispatcher.each(lambda logger: logger.log_hyperparams(masked(params)))


def _set_up_model(trainer: Trainer, job: Job) -> None:
    module = trainer.module
    trainer.precision_plugin = make_precision(trainer.precision, trainer.world.device)
    trainer.precision_plugin.convert(module)
    if trainer.sync_batchnorm and (trainer.world.size > 1 or trainer.world.newcomer):
        synchronise(module, trainer.world.device)
    trainer.strategy.place(module)
    _compile(trainer)
    overridden: dict[str, Any] = {
        name: overrides(module, name, ModuleHooks)
        for name in ("backward", "batch_weight", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    }
    trainer.overridden = Overridden(**overridden, ckpt_path=as_path(job.ckpt_path) if job.ckpt_path else None)
    trainer.bring = _batch_transfer(trainer)
    load_data(trainer, job)
    _check_samples_of_all_ranks(trainer, job)
    if trainer.train_feed is not None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        trainer.recorder.update_attributes(
            loader_processes=trainer.train_feed.processes, cores=max(1, cores // max(1, trainer.world.local_size))
        )
    if job.stage != "fit":
        comparison.compare(trainer.world, comparison.of_module(module) | comparison.of_data(None, trainer.val_feeds))
        wrap_steps(trainer)
        trainer.attach_log(None)
        return
    trainer.fault_tolerance = fault_tolerance.set_up(trainer)
    _check_options(trainer)
    data = comparison.of_data(trainer.train_feed, trainer.val_feeds)
    settings = comparison.of_training(trainer) | comparison.of_module(module) | data
    comparison.compare_at_set_up(trainer.world, "training", settings)
    trainer.strategy.setup(module, several_backwards=not module.automatic_optimization)
    wrap_steps(trainer)
    if trainer.state.step and job.ckpt_path is None:
        trainer.print(
            f"this run continues after {trainer.state.step} steps of an earlier fit with its weights, and with new "
            "optimizers and schedules; set ckpt_path='last' to continue with those of the newest checkpoint"
        )
    trainer.logbook = trainer.train_logbook = Logbook(trainer.strategy, training=True, weigh=trainer.weigh)
    trainer.attach_log(trainer.logbook)
    trainer.training_step = trainer.strategy.wrap_step(trainer.training_step)
    trainer.optimizers, trainer.lr_schedulers = parse_optimizers(module.configure_optimizers())
    comparison.compare_at_set_up(
        trainer.world, "optimizers", comparison.of_optimizers(module, trainer.optimizers, trainer.lr_schedulers)
    )
    trainer.overridden.metrics_each_step = need_metrics_each_step(trainer)
    trainer.overridden.closures = frozenset(
        id(optimizer) for optimizer in trainer.optimizers if needs_closure(optimizer)
    )
    trainer.closures = bool(trainer.overridden.closures)
    if trainer.closures and trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: an optimizer that computes the loss several "
            "times, such as LBFGS, supports only one batch per update; remove the option and set a larger batch_size"
        )
    if trainer.strategy.dealer is not None:
        has_buffers = next(module.buffers(), None) is not None
        trainer.strategy.dealer.keeps_state = has_buffers or bool(metric_objects(module))
    trainer.strategy.take_over(trainer.optimizers)
    guard_weights(trainer)
    trainer.optimizer_handles = [OptimizerHandle(optimizer, trainer) for optimizer in trainer.optimizers]
    if not module.automatic_optimization:
        manual_optimization.watch_gradients(trainer)
    share_settings(trainer)
    if module.example_input_array is not None:
        trainer.logger_dispatcher.each(lambda logger: logger.log_graph(module, module.example_input_array))


def _check_options(trainer: Trainer) -> None:
    """Refuse options that the module does not support, before training."""
    if not trainer.module.automatic_optimization:
        manual_optimization.check_options(trainer)
    if (
        trainer.gradient_clip_val is not None
        and trainer.gradient_clip_algorithm == "norm"
        and trainer.strategy.norm_clipping_refused
    ):
        raise ValueError(trainer.strategy.norm_clipping_refused)
    if trainer.overridden.batch_weight and trainer.world.size > 1 and trainer.strategy.batch_weight_refused:
        raise ValueError(trainer.strategy.batch_weight_refused)
    clips = trainer.gradient_clip_val is not None and not trainer.overridden.configure_gradient_clipping
    if clips and sparse_tables(trainer.module):
        raise ValueError(SPARSE_CLIPPED)


def _check_samples_of_all_ranks(trainer: Trainer, job: Job) -> None:
    """Refuse data with a batch in which a rank has no sample, if the forward is a collective of all ranks."""
    if job.stage != "fit" or trainer.world.size == 1 or trainer.world.newcomer or not synchronised(trainer.module):
        return
    if trainer.train_feed.leaves_out(trainer.accumulate_grad_batches):
        remedy = "set drop_last=True on the DataLoader, or another batch_size"
        if not trainer.train_feed.exact_position:
            remedy = "set limit_train_batches to a number of batches that every rank has"
        raise ValueError(
            "SyncBatchNorm needs a sample on each rank in each batch, and at the end of an epoch some of "
            f"{trainer.world.size} ranks may have none: {remedy}"
        )


def _compile(trainer: Trainer) -> None:
    if not trainer.compile:
        return
    options = dict(trainer.compile) if isinstance(trainer.compile, Mapping) else {}
    # In place, so that names in the state dict do not change. Without a forward, training_step calls the children.
    has_forward = type(trainer.module).forward is not nn.Module.forward
    for part in [trainer.module] if has_forward else list(trainer.module.children()):
        part.compile(**options)


def _batch_transfer(trainer: Trainer) -> Callable[[Any, int], Any] | None:
    """Return the function that transfers a batch to the device; None where batches need no transfer."""
    owners = [owner for owner in (trainer.datamodule, trainer.module) if owner is not None]

    def overridden(name: str) -> Callable[..., Any] | None:
        for owner in owners:
            contract = DataModule if isinstance(owner, DataModule) else ModuleHooks
            if overrides(owner, name, contract):
                method: Callable[..., Any] = getattr(owner, name)
                return method
        return None

    before, move, after = (
        overridden("on_before_batch_transfer"),
        overridden("transfer_batch_to_device"),
        overridden("on_after_batch_transfer"),
    )
    convert, device = trainer.precision_plugin.convert_batch(), trainer.world.device
    if device.type == "cpu" and not (before or move or after or convert):
        return None  # the batch is on the device already

    def transfer(batch: Any, loader: int) -> Any:
        batch = before(batch, loader) if before else batch
        batch = move(batch, device, loader) if move else to_device(batch, device)
        batch = convert(batch) if convert else batch
        return after(batch, loader) if after else batch

    return transfer


def _close(trainer: Trainer, ending: Ending) -> None:
    """Release all resources of the run, also after an error."""
    with _attempt_all() as attempt:
        if trainer.agreement is not None:
            attempt(trainer.agreement.close)
        if trainer.writer is not None:
            attempt(trainer.writer.close)
        for undo in trainer.overridden.undo if trainer.overridden is not None else ():
            attempt(undo)
        attempt(functools.partial(trainer.logger_dispatcher.close, ending))
        attempt(functools.partial(trainer.recorder.close, ending))
        attempt(trainer.strategy.teardown)
    trainer.logger_dispatcher, trainer.recorder = LoggerDispatcher(), NoopRecorder()
    trainer.agreement = trainer.writer = trainer.shared = None
    trainer.state.phase = Phase.IDLE
    if trainer.module is not None:
        trainer.attach_log(None)
    _backend_flags(trainer, on=False)


@contextlib.contextmanager
def _attempt_all() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Yield a function that runs an action and keeps its error; at the end, raise the first error."""
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]
