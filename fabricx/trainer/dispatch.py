"""Selects the processes of a run: this process, the ranks of a launcher, or new workers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from fabricx.checkpoint.storage import as_path, is_local
from fabricx.core.callback import recovery_policy_of
from fabricx.core.state import TrainerFn, TrainerStatus
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.distributed import world as worlds
from fabricx.distributed.departure import await_departure
from fabricx.distributed.sharding.grad_hooks import check_before_pickling
from fabricx.distributed.world import World
from fabricx.errors import Interrupted, Terminated, full_disk_costs
from fabricx.fault_tolerance import memory_holder
from fabricx.launch import cluster
from fabricx.launch.launcher import Launcher
from fabricx.launch.resize import ELASTIC, forget_request
from fabricx.launch.run_lock import exclusive_run
from fabricx.launch.signals import termination_signals
from fabricx.telemetry.aggregator import Aggregator
from fabricx.trainer import cluster_run
from fabricx.trainer.launcher_run import check_launcher_use
from fabricx.trainer.process import decided_by_main_rank, device_of, interruptible
from fabricx.trainer.run_dir import describe, new_run_dir, resolve_checkpoint
from fabricx.trainer.run_request import Job, check_callbacks, check_job
from fabricx.trainer.set_up import execute, next_job
from fabricx.trainer.worker_run import elastic_policy, run_in_workers

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy
    from fabricx.fault_tolerance.controller import ElasticPolicy
    from fabricx.trainer.interface import TrainerInterface
    from fabricx.trainer.run_records import RunRecords

_USES: Final = {"fit": "continues from", "validate": "validates", "test": "tests", "predict": "predicts with"}


def dispatch(trainer: TrainerInterface, job: Job) -> Any:
    """Run a job in the right processes, and copy weights, metrics and positions to the caller's objects.

    Args:
        trainer: the caller's trainer.
        job: not validated yet.

    Returns:
        the results of the job; None after training.

    Raises:
        ValueError: an argument is invalid.
        WorkerFailed: a worker failed, and the run did not recover.
        SystemExit: with code 143, after SIGTERM or a scheduler's notice: when a training run is stopped and saved, or
            immediately in an evaluation. Also a SystemExit of a hook.
        Interrupted: Ctrl-C in an evaluation, or a KeyboardInterrupt of a hook.
    """
    with _running(trainer, job.stage), contextlib.ExitStack() as stack:
        check_job(job)
        check_callbacks(trainer, job)
        trainer.records.begin(fits=job.stage == "fit")
        trainer.show_loaders(None)
        _check_started(trainer.launcher, cluster_run.is_launched(trainer.num_nodes))
        if _serve_launch(trainer, job):
            return []  # a server has no results
        processes = _select_processes(trainer, job)
        elastic, aggregator = _open_run(trainer, job, processes, stack)
        if not processes.new_workers:
            return _run_here(trainer, job, processes, stack)
        if processes.launcher is not None:
            stack.enter_context(processes.launcher.starts())
        return run_in_workers(trainer, job, aggregator, elastic)


@contextlib.contextmanager
def _running(trainer: TrainerInterface, stage: str) -> Iterator[None]:
    """Context of a run, which sets `trainer.state` and ends the program if a signal has ended the run."""
    trainer.state.fn, trainer.state.status = TrainerFn(stage), TrainerStatus.RUNNING
    try:
        yield
    except BaseException as error:
        trainer.state.status = TrainerStatus.INTERRUPTED
        if type(error) is not KeyboardInterrupt:
            raise
        trainer.print(f"trainer.{stage}() was interrupted")
        raise Interrupted(*error.args).with_traceback(error.__traceback__) from error
    trainer.state.status = TrainerStatus.FINISHED
    if trainer.terminated:
        raise Terminated


@dataclass(frozen=True)
class _Processes:
    """The processes of a run.

    Attributes:
        here: the world of which this process is a rank; None if this process is not a rank yet.
        alone: this process is no rank of a launch, or of a world that the user's program has joined.
        new_workers: workers are started; otherwise this process runs the job.
        launcher: starts the workers; None for workers of this process.
    """

    here: World | None
    alone: bool
    new_workers: bool
    launcher: Launcher | None

    @property
    def main(self) -> bool:
        """Return whether this process writes the files of the run."""
        return self.here is None or self.here.main_rank


def _serve_launch(trainer: TrainerInterface, job: Job) -> bool:
    """Serve the run if this process is a server of a launch; returns whether it was."""
    launched = cluster_run.launched_server(as_part(trainer.strategy, HasServers).servers)
    if launched is None:
        return False
    server = trainer.serve_as(World(rank=launched.rank, local_rank=launched.local_rank, job=next_job()))
    cluster_run.serve_launch(trainer.strategy, launched, server.job, fits=job.stage == "fit")
    return True


def _select_processes(trainer: TrainerInterface, job: Job) -> _Processes:
    """Join the world of a launch, or decide whether workers are started."""
    strategy, fits = trainer.strategy, job.stage == "fit"
    servers = as_part(strategy, HasServers).servers
    launcher = trainer.launcher if isinstance(trainer.launcher, Launcher) else None
    if launcher is not None:
        check_launcher_use(launcher, strategy)
    here = worlds.current() or (None if launcher is not None else cluster_run.join_launch(trainer, strategy))
    launched = cluster_run.is_launched(trainer.num_nodes)
    alone = here is None or (here.size == 1 and not launched)
    several = len(trainer.device_ids) * trainer.num_nodes > 1 or (fits and servers > 0)
    new_workers = alone and (launcher is not None or several)
    if new_workers and fits:
        check_before_pickling(job.module)
    if not alone and fits and servers and not launched:
        _refuse_missing_servers(strategy, servers)
    return _Processes(here, alone, new_workers, launcher)


def _open_run(
    trainer: TrainerInterface, job: Job, processes: _Processes, stack: contextlib.ExitStack
) -> tuple[ElasticPolicy | None, Aggregator | None]:  # fmt: skip
    """Find and lock the folder of the run, resolve its checkpoint, and open its records until the end of the run.

    Returns:
        how lost workers are replaced, None if they are not; and the aggregator of telemetry, None without.
    """
    strategy, callbacks, records, here = trainer.strategy, trainer.callbacks, trainer.records, processes.here
    fits, root = job.stage == "fit", Path(trainer.default_root_dir)
    writes = fits and trainer.writes
    if fits and here is not None and (policy := recovery_policy_of(callbacks)) is not None and policy.snapshots:
        trainer.failure_log.errors = _continue_launch(records, job, here, root, strategy, stack)
    replaced = processes.new_workers and fits and processes.launcher is None
    elastic = elastic_policy(strategy, callbacks) if replaced else None

    def lock(run_dir: Path) -> None:
        if writes and processes.main:
            stack.enter_context(exclusive_run(run_dir, "" if elastic is None else ELASTIC))
            forget_request(run_dir)

    _prepare_run_dir(records, job, here, root, trainer.checkpoint_callback, lock)
    aggregator = None
    if writes and trainer.enable_telemetry:
        if processes.main:
            board = any(logger.shows_telemetry for logger in trainer.loggers)
            aggregator = _aggregate(records, stack, board=board, separate=processes.new_workers)
        decided_by_main_rank(here, lambda: None)  # other ranks continue when the records of the run exist
    return elastic, aggregator


def _run_here(trainer: TrainerInterface, job: Job, processes: _Processes, stack: contextlib.ExitStack) -> Any:
    """Execute the job in this process, alone or as a rank of a launch; returns its results."""
    signals, here = (signal.SIGINT, *termination_signals()), processes.here
    stack.enter_context(interruptible(job.stage, trainer.request_stop, signals))
    if here is None or processes.alone:
        here = World(device=device_of(trainer.device_ids[0], trainer.accelerator))
        return execute(trainer, job, here).results
    with cluster_run.watched(here), cluster.shows_rank(here):
        results = execute(trainer, job, here).results
    if trainer.strategy.traits.lockstep:  # else ranks end independently of each other
        await_departure(trainer.world)  # the script may exit now, and no supervisor keeps this process alive
    return results


def _check_started(launcher: object, launched: bool) -> None:
    """Refuse "local" in a rank of a launch, and "environment" outside."""
    if launcher == "local" and launched:
        raise ValueError("launcher='local', but a launcher has started this process as a rank; set launcher='auto'")
    if launcher == "environment" and not launched:
        raise ValueError(
            "launcher='environment', but no launcher has started this process as a rank: start the script with "
            "torchrun, mpirun or srun, or in a job of SageMaker, or set launcher='auto'"
        )


def _refuse_missing_servers(strategy: Strategy, servers: int) -> None:
    """Refuse servers in a world that the user's program has joined: no process of it would serve."""
    raise ValueError(
        f"{type(strategy).__name__}(servers={servers}) needs server processes, and "
        "the world that your program has joined has none: call fit outside of that world, so that fabricx starts "
        "workers and servers; or start the script with torchrun and an additional process for each server; or use "
        "ParameterServer(servers=0)"
    )


def _continue_launch(
    records: RunRecords, job: Job, here: World, root: Path, strategy: Strategy, stack: contextlib.ExitStack
) -> list[str]:  # fmt: skip
    """Continue the run that was in progress when torchrun restarted all processes; returns a line for each restart."""
    run = cluster_run.continue_launch(here, root, records.run_dir)
    if run is None:
        return []
    records.run_dir = run.run_dir
    job.ckpt_path = as_path(run.newest) if run.newest is not None else job.ckpt_path
    replaced = cluster.has_restarts() and strategy.traits.lockstep
    if replaced and not as_part(strategy, HasServers).servers:
        folder = memory_holder.folder_of(run.number)
        stack.enter_context(cluster_run.memory_checkpoints_held(here, folder))
    return ["torchrun has restarted all processes"] * run.restarts


def _prepare_run_dir(
    records: RunRecords, job: Job, here: World | None, root: Path, saving: Any, lock: Callable[[Path], None]
) -> None:  # fmt: skip
    """Determine the run's folder, lock it, and resolve the checkpoint to start from, which `saving` may know."""

    def resolve() -> str | None:
        path = resolve_checkpoint(job.ckpt_path, saving, records.run_dir, root, trains=job.stage == "fit")
        if path is not None and job.ckpt_path != "best":
            line = f"{_USES[job.stage]} {describe(path)}"
            if sys.stderr.isatty() and len(line) > shutil.get_terminal_size().columns:
                line = line.replace(" (step ", "\n  (step ", 1)
            print(line, file=sys.stderr, flush=True)
        return None if path is None else str(path)

    # An existing folder is locked first, because another process may use it; a new folder needs a valid checkpoint.
    earlier = records.run_dir
    if earlier is not None:
        lock(earlier)
    resolved = decided_by_main_rank(here, resolve)
    path = None if resolved is None else as_path(resolved)
    # A worker makes the path of a URL, after it has imported the module, which may define the storage.
    requested = job.ckpt_path
    job.ckpt_path = path if path is None or is_local(path) else resolved
    # Programs compare it with `best_model_path`, a text, or with the path that they have passed.
    records.ckpt_path = job.ckpt_path if isinstance(requested, PurePath) else resolved
    if earlier is None:
        chosen = decided_by_main_rank(here, lambda: str(records.next_run_dir or new_run_dir(root)))
        records.run_dir = as_path(chosen)
        try:
            lock(records.run_dir)
        except OSError as error:
            text = f"{error.strerror} (the run's folder can't be created: set default_root_dir to a writable folder)"
            raise OSError(error.errno, text, str(records.run_dir)) from None


def _aggregate(records: RunRecords, stack: contextlib.ExitStack, *, board: bool, separate: bool) -> Aggregator:
    """Aggregate the records of all ranks during training, for warnings, TensorBoard and the report."""
    assert records.run_dir is not None
    records.run_dir.mkdir(parents=True, exist_ok=True)
    with full_disk_costs("the records of this run"):
        aggregator = Aggregator(records.run_dir, board=board, separate=separate)

    def stop(kind: Any, error: BaseException | None, traceback: Any) -> None:
        stopped = records.stop.interrupted or isinstance(error, KeyboardInterrupt)
        aggregator.close("interrupted" if stopped else "success" if error is None else "failed")

    stack.push(stop)
    return aggregator
