"""Execution of a job on a rank: set-up, loop, teardown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricx.checkpoint import is_foreign, read_manifest
from fabricx.checkpoint.storage import as_path
from fabricx.consistency import comparison
from fabricx.consistency.shared_settings import OwnSettings
from fabricx.core.arguments import described
from fabricx.core.datamodule import DataModule
from fabricx.core.gradient_checks import SPARSE_CLIPPED, sparse_tables
from fabricx.core.hooks import check_hooks, fitted, overrides
from fabricx.core.hparams import plain
from fabricx.core.logger import Ending
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.optimizers import OptimizerHandle, need_metrics_each_step, needs_closure, parse_optimizers
from fabricx.core.precision import make_precision
from fabricx.core.rank_zero import set_rank
from fabricx.core.rng import RandomState, seed_generators
from fabricx.core.state import Phase
from fabricx.core.strategy_parts import MeasuresWaiting, ModelParallel, as_part
from fabricx.core.transfer import to_device
from fabricx.data.advice import advise_on_logging
from fabricx.data.run_data import RunData
from fabricx.data.shared_memory import note_on
from fabricx.distributed.sync_batchnorm import synchronise, synchronised
from fabricx.distributed.world import World
from fabricx.errors import full_disk_costs
from fabricx.fault_tolerance import fault_tolerance
from fabricx.lightning import adapt_callback
from fabricx.loop import evaluation, manual_optimization
from fabricx.loop import fit_asynchronous as asynchronous
from fabricx.loop.fit import fit, train_batches
from fabricx.loop.update import step_optimizer
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.metrics.objects import metric_objects, reduce_along
from fabricx.metrics.run_metrics import RunMetrics
from fabricx.redaction import masked
from fabricx.scratch import set_multiprocessing_folder
from fabricx.session.checkpoint import begin_from_weights, restore_requested
from fabricx.session.session import Session
from fabricx.session.status import Overridden
from fabricx.telemetry import events as telemetry
from fabricx.telemetry.recorder import NoopRecorder, Results, open_recorder
from fabricx.trainer import provenance
from fabricx.trainer.factory import listed
from fabricx.trainer.result import Outcome
from fabricx.trainer.trial import trial_of

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.module import Module
    from fabricx.core.options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.telemetry.logs import LogSettings
    from fabricx.trainer.interface import TrainerInterface
    from fabricx.trainer.run_request import Job


_JOBS = itertools.count()  # all ranks of a world run the same jobs in the same order


def next_job() -> int:
    """Return the number of the next run in this world; all its processes count the same."""
    return next(_JOBS)


def execute(trainer: TrainerInterface, job: Job, world: World) -> Outcome:
    """Run a job on this rank, from set-up to teardown.

    Args:
        trainer: of this rank.
        job: validated.
        world: has joined its process group; a newcomer joins later.

    Returns:
        the results of the job, on this rank.
    """
    set_multiprocessing_folder()
    try:
        session = _build(trainer, job, world)
    except BaseException:
        _undo_build(trainer)
        raise
    ending: Ending = "failed"
    try:
        _set_up(trainer, session, job)
        results = _work(session, job)()
        _call(session.hooks.teardown, job.stage)
        if session.datamodule is not None:
            fitted(session.datamodule, "teardown", DataModule)(job.stage)
        if session.divided and job.stage == "fit":
            _restore_whole(session)
        ending = "interrupted" if session.stop.interrupted else "success"
        return Outcome(results)
    except BaseException as error:
        if note := note_on(error, session.data.train_dataloader):
            error.add_note(note)
        _call(session.hooks.on_exception, error)
        if session.datamodule is not None:
            session.datamodule.on_exception(error)
        raise
    finally:
        _close(session, ending)


def _restore_whole(session: Session) -> None:
    """Give the module, its optimizers and callbacks whole weights again; all ranks call it."""
    part = as_part(session.strategy, ModelParallel)
    keeping = [callback for callback in session.callbacks if callback.keeps_weights]
    states = part.whole_state({str(number): callback.state_dict() for number, callback in enumerate(keeping)})
    part.restore_whole(session.module)
    for number, callback in enumerate(keeping):
        callback.load_state_dict(states[str(number)])


def _call(hook: tuple[Callable[..., Any], ...], *args: Any) -> None:
    for function in hook:
        function(*args)


def _load_weights(session: Session) -> None:
    """Load the weights to evaluate from the checkpoint; without a checkpoint, copy rank 0's weights to all ranks."""
    restore_requested(session, weights_only=True)
    if session.overridden.ckpt_path is None:
        comparison.share_weights(session.world, session.module)


def _predict(session: Session, job: Job) -> list[Any]:
    _load_weights(session)
    by_loader = [
        session.world.axis("metrics").gather_objects(outputs)
        for outputs in evaluation.predict(session, session.data.val_feeds, keep=job.flag)
    ]
    ordered = [evaluation.in_dataset_order(by_rank) for by_rank in by_loader]
    return ordered if session.data.several_loaders else ordered[0]


def _evaluate(session: Session, job: Job) -> list[dict[str, float]]:
    _load_weights(session)
    results = evaluation.evaluate(
        session, Phase.VALIDATE if job.stage == "validate" else Phase.TEST, session.data.val_feeds
    )
    if job.flag and session.world.main_rank:
        session.print(table(results, job.stage))
    return results


def _work(session: Session, job: Job) -> Callable[[], Any]:
    """Return the function that executes a job; for `fit`, the synchronous or the asynchronous training loop."""
    if job.stage == "fit":
        batches = train_batches if session.strategy.traits.lockstep else asynchronous.train_batches
        return functools.partial(fit, session, batches)
    return functools.partial(_predict if job.stage == "predict" else _evaluate, session, job)


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


def _build(trainer: TrainerInterface, job: Job, world: World) -> Session:
    """Build the parts of a run that exist before the first hook, in the order of `core/hooks.md`."""
    module, datamodule, strategy, state = job.module, job.datamodule, trainer.strategy, trainer.state
    world = as_part(strategy, ModelParallel).with_axes(dataclasses.replace(world, job=next_job()))
    strategy.enter(world, module)
    set_rank(world.rank)
    shares = world.axis("data").size
    state.ranks = (ranks_that_began(job) if job.began_with is None else job.began_with) or state.ranks or shares
    state.shared_by = shares
    _seed(state, world)
    _backend_flags(trainer)
    trainer.module, trainer.datamodule = module, datamodule
    module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    trainer.callbacks = _with_module_callbacks(trainer.callbacks, module)
    data = RunData(
        job.stage, (job.train, job.evaluate), module, datamodule, trainer, strategy, state, trainer.balance,
        trainer.batches,
    )  # fmt: skip
    data.train_dataloader = trainer.train_dataloader  # validation may read the data of an earlier fit
    metrics = RunMetrics(module, trainer, strategy, state, trainer.published, writes=trainer.writes)
    session = Session(
        trainer, trainer, state, world, strategy, module, datamodule, trainer.callbacks, trainer.loggers, data, metrics,
        trainer.stop, trainer.failure_log, trainer.balance, trainer.run_dir,
    )  # fmt: skip
    trainer.begin_session(session, fits=job.stage == "fit")
    if trainer.stop.requested and job.stage == "fit":  # by a signal, since the run was started
        session.agreement.request(trainer.stop.reason)
    return session


def _set_up(trainer: TrainerInterface, session: Session, job: Job) -> None:
    """Set up a run from its first hook on, in the order of `core/hooks.md`."""
    masked([trainer.configuration, plain(session.module.hparams)])  # registers secrets: logs and errors mask them
    _open_recorder(session, job, trainer.log_settings)
    _open_loggers(session, job, trainer.arguments)
    for owner in (session.datamodule, session.module):
        if owner is not None and not session.world.newcomer and _prepares(owner, session.world):
            owner.prepare_data()
    session.world.barrier()
    if session.datamodule is not None:
        fitted(session.datamodule, "setup", DataModule)(job.stage)
    _call(session.hooks.setup, job.stage)
    with session.sharding.init_context() if job.stage == "fit" else contextlib.nullcontext():
        session.module.configure_model()
    _set_up_model(session, job)


def ranks_that_began(job: Job) -> int:
    """Return the number of ranks with which the run of a checkpoint began; 0 without a checkpoint or without a record.

    It determines the length of an epoch, which the schedules of the optimizers need before the checkpoint is loaded.

    Args:
        job: its path of a checkpoint is resolved.
    """
    if job.stage != "fit" or job.ckpt_path is None or is_foreign(job.ckpt_path):
        return 0
    return int(read_manifest(as_path(job.ckpt_path)).get("ranks", 0))


def _layout_before(job: Job) -> dict[str, Any]:
    """Return how the run of a checkpoint divided the module; {} without a checkpoint or a division."""
    if job.ckpt_path is None or is_foreign(job.ckpt_path):
        return {}
    return dict(read_manifest(as_path(job.ckpt_path)).get("layout") or {})


def _prepares(owner: Module | DataModule, world: World) -> bool:
    """Return whether `prepare_data` runs on this rank: by default on a rank of each machine."""
    return world.local_rank == 0 if getattr(owner, "prepare_data_per_node", True) else world.main_rank


def _seed(state: RunState, world: World) -> None:
    """Share the seed of the data order with all ranks; seed other random generators by the share of the data."""
    state.seed, data = world.broadcast_object(state.seed), world.axis("data")
    if data.size > 1:
        seed_generators((state.seed + data.rank) % 2**32)
    model = world.axis("model")
    if model.size > 1:  # ranks that compute a share together draw the same numbers
        RandomState.unpacked(model.broadcast_object(RandomState().packed())).restore()


def _backend_flags(options: TrainerOptions, *, on: bool = True) -> None:
    """Set or reset the global flags of torch that the options of the run require."""
    if options.detect_anomaly:
        torch.autograd.set_detect_anomaly(on)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(on, warn_only=options.deterministic == "warn")
    if options.benchmark is not None:
        torch.backends.cudnn.benchmark = options.benchmark and on


def _with_module_callbacks(callbacks: list[Callback], module: Module) -> list[Callback]:
    """Return the callbacks, with those of the module in place of callbacks of the same class."""
    configured = module.configure_callbacks()
    for callback in listed(configured):
        adapt_callback(callback)
        check_hooks(callback)
        callbacks = [*(other for other in callbacks if type(other) is not type(callback)), callback]
    return callbacks


def _open_recorder(session: Session, job: Job, logs: LogSettings | None) -> None:
    """Open the telemetry of this rank, if the run writes files; an evaluation records only its results."""
    if not session.writes or not session.options.enable_telemetry or session.run_dir is None:
        return
    if job.stage != "fit":
        if job.stage != "predict" and session.world.main_rank and (session.run_dir / telemetry.FOLDER).is_dir():
            with full_disk_costs("the records of the results"):
                session.recorder = Results(session.run_dir)
    else:
        attributes = {
            "strategy": type(session.strategy).__name__, "servers": session.serving.servers,
            "synchronous": session.strategy.traits.synchronous,
            "device": str(session.world.device), "precision": session.options.precision,
            "attempt": session.state.attempt,
        }  # fmt: skip
        waiting = as_part(session.strategy, MeasuresWaiting)
        with full_disk_costs("the records of this rank"):
            session.recorder = open_recorder(session.run_dir, session.world, waiting, logs, **attributes)


def _open_loggers(session: Session, job: Job, arguments: Mapping[str, Any]) -> None:
    if job.stage == "predict" or not session.world.main_rank or session.options.fast_dev_run:
        return
    assert session.run_dir is not None
    if session.loggers or job.stage == "fit":
        session.run_dir.mkdir(parents=True, exist_ok=True)
    session.metrics.loggers = LoggerDispatcher(session.loggers, session.run_dir, session.recorder)
    if job.stage != "fit":
        return
    provenance.write(session.run_dir, None)
    recorded: dict[str, Any] = {"trainer": arguments}
    for name, owner in (("module", session.module), ("datamodule", session.datamodule)):
        if owner is not None:
            recorded[name] = {"class": type(owner).__name__, **described(owner.hparams)}
    provenance.write_arguments(session.run_dir, recorded)
    for name in ("config.yaml", "arguments.yaml", "command.txt"):
        if (file := session.run_dir / name).is_file():
            text = (file.stem, file.read_text())
            session.metrics.loggers.each(lambda logger, text=text: logger.log_text(*text))  # type: ignore[misc]
    hparams_to_log = [
        owner.hparams
        for owner in (session.module, session.datamodule)
        if owner is not None and owner.__dict__.get("_log_hyperparams") and session.options.enable_autolog_hparams
    ]
    params = {name: value for hparams in hparams_to_log for name, value in plain(hparams).items()}
    if params:
        session.metrics.loggers.each(lambda logger: logger.log_hyperparams(masked(params)))


def _set_up_model(session: Session, job: Job) -> None:
    module = session.module
    session.precision = make_precision(session.options.precision, session.world.device)
    session.precision.convert(module)
    if session.options.sync_batchnorm and (session.world.size > 1 or session.world.newcomer):
        synchronise(module, session.world.device)
    _place(module, session.world.device)
    _compile(session)
    overridden: dict[str, Any] = {
        name: overrides(module, name, ModuleHooks)
        for name in ("backward", "batch_weight", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    }
    session.overridden = Overridden(**overridden, ckpt_path=as_path(job.ckpt_path) if job.ckpt_path else None)
    session.window.by_weight = session.overridden.batch_weight and module.automatic_optimization
    session.transfer = _batch_transfer(session)
    session.data.load(session.world)
    if session.divided:
        metrics = session.world.axis("metrics")
        session.overridden.undo += [reduce_along(metric, metrics) for metric in metric_objects(module).values()]
    if job.stage == "fit" and session.world.main_rank and not session.options.fast_dev_run:
        advise_on_logging(session.data.batches.training, session.options.log_every_n_steps, session.loggers)
    _check_samples_of_all_ranks(session, job)
    if job.stage == "fit":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        session.recorder.update_attributes(
            loader_processes=session.data.train_feed.processes, cores=max(1, cores // max(1, session.world.local_size))
        )
    if job.stage != "fit":
        comparison.compare(
            session.world, comparison.of_module(module) | comparison.of_data(None, session.data.val_feeds)
        )
        session.wrap_steps(fits=False)
        session.metrics.begin(session.weigh)
        session.metrics.collect(None)
        return
    session.fault_tolerance = fault_tolerance.set_up(session)
    _check_options(session)
    data = comparison.of_data(session.data.train_feed, session.data.val_feeds)
    settings = (
        comparison.of_training(session.options, module, session.strategy, session.callbacks)
        | comparison.of_module(module)
        | data
    )
    comparison.compare_at_set_up(session.world, "training", settings)
    if late := any(parameter.is_meta for parameter in module.parameters()):  # the strategy creates these when it shards
        session.strategy.setup(module, several_backwards=not module.automatic_optimization)
    begin_from_weights(session)
    if not late:
        trial = functools.partial(trial_of, session)
        before = {} if session.world.newcomer else _layout_before(job)  # the checkpoint may be gone when it joins
        as_part(session.strategy, ModelParallel).parallelize(module, trial, before)
        session.strategy.setup(module, several_backwards=not module.automatic_optimization)
    session.wrap_steps(fits=True)
    if session.state.step and job.ckpt_path is None:
        session.print(
            f"this run continues after {session.state.step} steps of an earlier fit with its weights, and with new "
            "optimizers and schedules; set ckpt_path='last' to continue with those of the newest checkpoint"
        )
    session.metrics.begin(session.weigh)
    session.metrics.collect(None)
    optimizers, schedules = parse_optimizers(module.configure_optimizers())
    if not optimizers:
        session.warn_once("no optimizer", "configure_optimizers returned no optimizer, so no weight will change")
    session.optimizers += optimizers
    session.lr_schedulers += schedules
    comparison.compare_at_set_up(
        session.world, "optimizers", comparison.of_optimizers(module, optimizers, schedules)
    )  # fmt: skip
    session.overridden.metrics_each_step = need_metrics_each_step(schedules, session.strategy)
    session.overridden.closures = frozenset(id(optimizer) for optimizer in optimizers if needs_closure(optimizer))
    if session.overridden.closures and session.options.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={session.options.accumulate_grad_batches}: an optimizer that computes the loss "
            "several times, such as LBFGS, supports only one batch per update; remove the option and set a larger "
            "batch_size"
        )
    if not session.strategy.traits.lockstep:
        has_buffers = next(module.buffers(), None) is not None
        session.dealer.keeps_state = has_buffers or bool(metric_objects(module))
    session.strategy.attach_optimizers(session.optimizers)
    session.checks.guard_weights(session.hooks)
    step = functools.partial(step_optimizer, session)
    session.optimizer_handles += [
        OptimizerHandle(optimizer, step, module.toggled_optimizer) for optimizer in optimizers
    ]
    if not module.automatic_optimization:
        manual_optimization.watch_gradients(session)
    session.share_settings()
    if module.example_input_array is not None:
        session.metrics.loggers.each(lambda logger: logger.log_graph(module, module.example_input_array))


def _check_options(session: Session) -> None:
    """Refuse options that the module or the strategy does not support, before training."""
    options = session.options
    as_part(session.strategy, ModelParallel).check_options(
        precision=options.precision, compiles=bool(options.compile), synchronises_batchnorm=options.sync_batchnorm,
        automatic_optimization=session.module.automatic_optimization,
    )  # fmt: skip
    if not session.module.automatic_optimization:
        manual_optimization.check_options(session)
    if (
        session.options.gradient_clip_val is not None
        and session.options.gradient_clip_algorithm == "norm"
        and session.serving.norm_clipping_refused
    ):
        raise ValueError(session.serving.norm_clipping_refused)
    if session.overridden.batch_weight and session.world.size > 1 and session.strategy.batch_weight_refused:
        raise ValueError(session.strategy.batch_weight_refused)
    clips = session.options.gradient_clip_val is not None and not session.overridden.configure_gradient_clipping
    if clips and sparse_tables(session.module):
        raise ValueError(SPARSE_CLIPPED)


def _check_samples_of_all_ranks(session: Session, job: Job) -> None:
    """Refuse data with a batch in which a rank has no sample, if the forward is a collective of all ranks."""
    if job.stage != "fit" or session.world.size == 1 or session.world.newcomer or not synchronised(session.module):
        return
    if session.data.train_feed.leaves_out(session.options.accumulate_grad_batches):
        remedy = "set drop_last=True on the DataLoader, or another batch_size"
        if not session.data.train_feed.exact_position:
            remedy = "set limit_train_batches to a number of batches that every rank has"
        raise ValueError(
            "SyncBatchNorm needs a sample on each rank in each batch, and at the end of an epoch some of "
            f"{session.world.size} ranks may have none: {remedy}"
        )


def _place(module: nn.Module, device: torch.device) -> None:
    """Move a module to the device of this rank; parameters on the meta device stay there."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def _compile(session: Session) -> None:
    if not session.options.compile:
        return
    options = dict(session.options.compile) if isinstance(session.options.compile, Mapping) else {}
    # In place, so that names in the state dict do not change. Without a forward, training_step calls the children.
    has_forward = type(session.module).forward is not nn.Module.forward
    for part in [session.module] if has_forward else list(session.module.children()):
        part.compile(**options)


def _batch_transfer(session: Session) -> Callable[[Any, int], Any] | None:
    """Return the function that transfers a batch to the device; None where batches need no transfer."""
    owners = [owner for owner in (session.datamodule, session.module) if owner is not None]

    def overridden(name: str) -> Callable[..., Any] | None:
        for owner in owners:
            contract = DataModule if isinstance(owner, DataModule) else ModuleHooks
            if overrides(owner, name, contract):
                return fitted(owner, name, contract)
        return None

    before, move, after = (
        overridden("on_before_batch_transfer"),
        overridden("transfer_batch_to_device"),
        overridden("on_after_batch_transfer"),
    )
    convert, device = session.precision.convert_batch(), session.world.device
    if device.type == "cpu" and not (before or move or after or convert):
        return None  # the batch is on the device already

    def transfer(batch: Any, loader: int) -> Any:
        batch = before(batch, loader) if before else batch
        batch = move(batch, device, loader) if move else to_device(batch, device)
        batch = convert(batch) if convert else batch
        return after(batch, loader) if after else batch

    return transfer


def _undo_build(trainer: TrainerInterface) -> None:
    """Release what an unfinished `_build` has set up."""
    trainer.strategy.teardown()
    trainer.state.phase = Phase.IDLE
    _backend_flags(trainer, on=False)


def _close(session: Session, ending: Ending) -> None:
    """Release all resources of the run, also after an error."""
    try:
        with _attempt_all() as attempt:
            attempt(session.agreement.close)
            attempt(session.checkpoints.close)
            for undo in session.overridden.undo:
                attempt(undo)
            attempt(functools.partial(session.metrics.loggers.close, ending))
            attempt(functools.partial(session.recorder.close, ending))
            attempt(session.strategy.teardown)
    finally:
        session.metrics.loggers, session.recorder = LoggerDispatcher(), NoopRecorder()
        session.settings = OwnSettings()
        session.running = False
        session.state.phase = Phase.IDLE
        session.metrics.collect(None)
        _backend_flags(session.options, on=False)


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
