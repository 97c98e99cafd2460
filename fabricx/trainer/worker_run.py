"""A run in new worker processes, which this process supervises and restarts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fabricx import by_value
from fabricx.checkpoint import is_committed, read_manifest
from fabricx.checkpoint.storage import as_path
from fabricx.core.callback import recovery_policy_of
from fabricx.core.module_state.rng import RandomState
from fabricx.core.options.trainer_options import TrainerOptions
from fabricx.core.strategy_parts import HasServers, ModelParallel, ShardsWeights, as_part
from fabricx.distributed.departure import await_departure
from fabricx.distributed.world import OPERATION, World
from fabricx.errors import PeerLost, Terminated, WorkerFailed
from fabricx.fault_tolerance.controller import ElasticPolicy
from fabricx.launch.launcher import Launcher
from fabricx.launch.signals import TERMINATED, EarlySignals, termination_signals
from fabricx.metrics.objects import gather_states, held_metrics
from fabricx.telemetry.logs import LogSettings
from fabricx.trainer import process, provenance
from fabricx.trainer.attributes import AttributesBefore, Changed
from fabricx.trainer.cluster_run import memory_checkpoints_held
from fabricx.trainer.hooks_of_layers import reserve_numbers
from fabricx.trainer.restart import restarts
from fabricx.trainer.result import holders, shared_names
from fabricx.trainer.run_dir import checkpoints_of, newest_whole
from fabricx.trainer.sessions import returned
from fabricx.trainer.set_up import execute, ranks_that_began

if TYPE_CHECKING:
    from pathlib import Path

    from fabricx.core.callback import Callback, RecoveryPolicy
    from fabricx.core.logger import Logger
    from fabricx.core.strategy import Strategy
    from fabricx.telemetry.aggregator import Aggregator
    from fabricx.trainer.interface import TrainerInterface
    from fabricx.trainer.result import Outcome
    from fabricx.trainer.run_request import Job


def run_in_workers(
    trainer: TrainerInterface, job: Job, aggregator: Aggregator | None, elastic: ElasticPolicy | None
) -> Any:  # fmt: skip
    """Run a job in new workers and servers; restart all from the newest checkpoint after a failure.

    Args:
        trainer: the caller's trainer; workers receive a copy.
        job: validated; its run has a folder.
        aggregator: aggregator of the run's records; None without telemetry.
        elastic: rules of recovery in place; None without.

    Returns:
        the results of the job.

    Raises:
        WorkerFailed: a worker failed, and the run did not recover.
        SystemExit: of a hook; or with code 143, after a signal to a rank in an evaluation.
        KeyboardInterrupt: of a hook.
    """
    from fabricx.launch.supervisor import run_workers
    from fabricx.trainer.launcher_run import run_ranks

    fits, serving, log = job.stage == "fit", as_part(trainer.strategy, HasServers), trainer.failure_log
    servers = serving.servers if fits else 0
    # The folder exists before the workers start, so that all use the same folder.
    if not trainer.fast_dev_run and fits:
        assert trainer.run_dir is not None
        provenance.write(trainer.run_dir, None)  # this process has the user's command line
    if trainer.writes and fits:
        _choose_folders(trainer.loggers)
    named = {"module": job.module, "trainer": trainer, "train_dataloaders": job.train, "dataloaders": job.evaluate,
             "datamodule": job.datamodule}  # fmt: skip
    log.errors, job.random = [], RandomState().packed()
    traces = any(callback.traces for callback in trainer.callbacks)
    records = None if aggregator is None else (aggregator.run_dir, traces)
    serve = functools.partial(process.serve, records=records, network=serving.link == "gloo")
    limits = _timeouts(recovery_policy_of(trainer.callbacks), trainer.accelerator, elastic)
    while True:
        job.began_with = ranks_that_began(job)
        try:
            with by_value.shared_objects(_shared(trainer, job, trainer.callbacks)):
                if isinstance(trainer.launcher, Launcher):
                    outcome = run_ranks(trainer.launcher, trainer, job, named)
                else:
                    outcome = run_workers(
                        work, (trainer, job, LogSettings.of_this_process()), size=len(trainer.device_ids), named=named,
                        servers=servers, serve=serve, elastic=elastic, failures=log.errors, run_dir=trainer.run_dir,
                        note=None if aggregator is None else aggregator.record_event,
                        stops_at_step=fits, **limits,
                    )[0]  # fmt: skip
        except WorkerFailed as error:
            _report_lost_checkpoint(aggregator, error)
            if isinstance(error.__cause__, SystemExit) and error.__cause__.code == TERMINATED:
                raise Terminated from None  # a signal to a rank has ended an evaluation
            if isinstance(cause := error.__cause__, (KeyboardInterrupt, SystemExit)):  # of a hook, as in one process
                error.__cause__ = None
                raise cause from error
            if not fits and error.__cause__ is None:  # killed: the failure may not recur, unlike an error
                error.add_remedy(
                    f"{job.stage} does not recover from the failure of a worker: call it again. The weights and "
                    "checkpoints are unchanged"
                )
            if not fits or error.stopping:
                raise
            assert trainer.run_dir is not None
            if not restarts(job, trainer.run_dir, trainer.callbacks, log, aggregator, error):
                checkpoints = checkpoints_of(trainer.run_dir)
                for callback in trainer.callbacks:
                    callback.after_failure(newest_whole(checkpoints) if checkpoints else None)
                raise
        else:
            trainer.callbacks = outcome.absorb(job.module, trainer.callbacks, trainer.loggers, job.datamodule)
            if fits:
                trainer.adopt_optimizers(outcome.returned)
            trainer.records.adopt(outcome.records)
            vars(trainer).update(outcome.options)
            trainer.attach(job.module, job.datamodule)
            return outcome.results


def _choose_folders(loggers: Sequence[Logger]) -> None:
    """Choose the folders of loggers before the ranks start, so that ranks that start again continue in them."""
    for logger in loggers:
        _ = logger.log_dir  # chosen when it is read first


def work(
    world: World, trainer: TrainerInterface, job: Job, logs: LogSettings,
    signals: tuple[signal.Signals, ...] | None = None, early: EarlySignals | None = None, copies: Path | None = None,
) -> Outcome | None:  # fmt: skip
    """Run a job in a worker or in a rank of a launcher.

    Args:
        world: has a store, and joins its process group here.
        trainer: this rank's copy.
        job: this rank's copy.
        logs: levels of the loggers of the calling process.
        signals: signals that stop the job; None for termination signals: the supervisor handles Ctrl-C.
        early: signals that arrived before this call; None without.
        copies: folder for in-memory checkpoints that outlive the ranks; None if the supervisor keeps them.

    Returns:
        the outcome for the caller, on the main rank only.
    """
    world, callbacks, job.copied = process.enter(trainer, world), list(trainer.callbacks), True
    built = {name for name, _ in job.module.named_modules()}
    reserve_numbers(job.module)
    shared = _shared(trainer, job, callbacks)
    options = _plain_options(trainer)
    with by_value.shared_objects(shared):
        before = AttributesBefore(job.module, job.datamodule)
    # Weakly, because the strategy may replace parameters, whose memory is free then.
    known = {name: weakref.ref(value) for name, value in shared.items()}
    del shared
    with process.interruptible(job.stage, trainer.request_stop, signals or termination_signals()):
        if early is not None:
            early.repeat()
        with _memory_checkpoints(trainer, job, world, copies):
            outcome = execute(trainer, job, world, logs)
    weights = as_part(trainer.strategy, ShardsWeights).whole_weights(job.module)
    _join_metric_objects(trainer, job)
    former = [(name, value) for name, reference in known.items() if (value := reference()) is not None]
    by_value.share([*former, *(item for item in _shared(trainer, job, callbacks).items() if item[0] in known)])
    changed = _changed(before, trainer, job)
    if trainer.strategy.traits.lockstep:  # else ranks end independently of each other
        await_departure(trainer.world)
    if not trainer.world.main_rank:
        return None
    outcome.changed = changed
    outcome.options = dict(_plain_options(trainer).items() - options.items())
    if job.stage == "fit":
        whole = not trainer.strategy.traits.sharded and not as_part(trainer.strategy, HasServers).servers
        outcome.returned = returned(trainer.optimizers, trainer.lr_schedulers, whole=whole)
    return outcome.portable(job.module, trainer.callbacks, callbacks, trainer.loggers, trainer.records, weights, built)


def _plain_options(trainer: TrainerInterface) -> dict[str, Any]:
    """Return the options that are numbers or texts, by name; hooks may set them."""
    names, simple = inspect.signature(TrainerOptions.__init__).parameters, (type(None), bool, int, float, str)
    return {name: value for name, value in vars(trainer).items() if name in names and type(value) in simple}


def _memory_checkpoints(
    trainer: TrainerInterface, job: Job, world: World, folder: Path | None
) -> contextlib.AbstractContextManager[None]:  # fmt: skip
    """Keep in-memory checkpoints in a folder, if the run recovers and its state is on its ranks."""
    policy, strategy = recovery_policy_of(trainer.callbacks), trainer.strategy
    recovers = job.stage == "fit" and policy is not None and policy.max_restarts > 0 and strategy.traits.lockstep
    if folder is None or not recovers:
        return contextlib.nullcontext()
    return memory_checkpoints_held(world, folder)


def _shared(trainer: TrainerInterface, job: Job, callbacks: Sequence[Callback]) -> dict[str, Any]:
    return shared_names(trainer, job.module, job.datamodule, callbacks, trainer.loggers)


def _changed(before: AttributesBefore, trainer: TrainerInterface, job: Job) -> Changed:
    """Return the attributes that the run has changed; all ranks call it."""
    world = trainer.world
    try:
        changed = before.changed(
            job.module, job.datamodule, world.axis("metrics").gather_objects, main_rank=world.main_rank
        )
    except PeerLost:  # after the training, which is complete
        changed = before.changed(job.module, None, list, main_rank=world.main_rank)
    if listed := [f"{name} ({why})" for name, why in changed.remaining.items() if name[0] != "_"]:
        trainer.print(f"attributes of {type(job.datamodule).__name__} that remain in the workers: {', '.join(listed)}")
    return changed


def _join_metric_objects(trainer: TrainerInterface, job: Job) -> None:
    """Merge the states of metric objects of all ranks into those of the main rank; all ranks call it."""
    metrics = held_metrics(holders(job.module, trainer.callbacks))
    if not metrics:
        return
    world = trainer.world
    lost = ""
    try:
        ended = gather_states(metrics, world, fits=job.stage == "fit")
    except PeerLost:  # after the training, which is complete
        ended, lost = [], "they lack the batches of other ranks, because a rank was lost at the end of the run"
    if world.generation and not trainer.strategy.traits.lockstep:
        lost = lost or "they may lack batches of workers that died"
    if not world.main_rank:
        return
    if lost:
        trainer.print(f"states of metric objects ({', '.join(metrics)}): {lost}")
    if ended:
        trainer.print(
            f"states of metric objects ({', '.join(ended)}) have a row for each rank (dist_reduce_fx=None): compute() "
            "joins the rows; call reset() before further updates"
        )


def _report_lost_checkpoint(aggregator: Aggregator | None, error: WorkerFailed) -> None:
    """Report the loss of a checkpoint that a hook was saving when the workers ended."""
    if error.saving is None:
        return
    path, step = as_path(error.saving[0]), error.saving[1]
    if is_committed(path) and read_manifest(path).get("step") == step:
        return
    text = (
        f"the checkpoint {path} was lost: it was being written at step {step} when a worker failed, and is missing "
        "unless a hook saves it again"
    )
    if aggregator is not None:
        aggregator.record_event("checkpoint", text)
    print(text, file=sys.stderr, flush=True)


def elastic_policy(strategy: Strategy, callbacks: Iterable[Callback]) -> ElasticPolicy | None:
    """Return the rules by which workers continue training after the death of a worker.

    Args:
        strategy: the run's strategy.
        callbacks: the run's callbacks; a callback for recovery has the limits.

    Returns:
        the rules; None without recovery in place.
    """
    if not strategy.traits.elastic:
        return None
    policy, lockstep = recovery_policy_of(callbacks), strategy.traits.lockstep
    if policy is None:
        return None if lockstep else ElasticPolicy()
    if not lockstep:  # ranks do not wait for each other
        return ElasticPolicy(least=policy.min_ranks, tries=policy.max_restarts)
    fixed = as_part(strategy, ModelParallel).divides
    return ElasticPolicy(policy.patience, policy.min_ranks, policy.max_restarts, not strategy.traits.replicated, fixed)


def _timeouts(policy: RecoveryPolicy | None, accelerator: str, elastic: ElasticPolicy | None) -> dict[str, Any]:
    """Return the supervisor's timeouts for silent workers, in seconds, by name; a missing name keeps the default."""
    limits: dict[str, Any] = {}
    if policy is not None:
        wanted = {"frozen_after": policy.frozen_after, "stuck_after": policy.stuck_after}
        limits = {name: seconds for name, seconds in wanted.items() if seconds is not None}
    if accelerator == "cuda" and elastic is not None:  # torch does not end collectives of such a group
        limits.setdefault("stuck_after", OPERATION.total_seconds())
    return limits
