"""Selects the processes of a run: this process, the ranks of a launcher, or new workers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch

from fabricx.checkpoint import is_committed, read_manifest
from fabricx.checkpoint.storage import as_path
from fabricx.core.callback import recovery_policy_of
from fabricx.core.strategy_parts import HasServers, ShardsWeights, as_part
from fabricx.distributed import world as worlds
from fabricx.distributed.generations import Membership
from fabricx.distributed.generations import enter as enter_membership
from fabricx.distributed.grad_hooks import check_before_pickling
from fabricx.distributed.world import OPERATION, World
from fabricx.errors import CheckpointError, WorkerFailed, full_disk_costs
from fabricx.fault_tolerance import memory_checkpoint, memory_holder
from fabricx.fault_tolerance.controller import ElasticPolicy
from fabricx.launch import cluster, launch_store
from fabricx.launch.pickling import check_script
from fabricx.launch.resize import ELASTIC
from fabricx.launch.run_lock import exclusive_run
from fabricx.launch.signals import TERMINATED, stop_now, termination_signals
from fabricx.telemetry.aggregator import Aggregator
from fabricx.telemetry.logs import LogSettings
from fabricx.trainer import provenance
from fabricx.trainer.result import Outcome
from fabricx.trainer.run_dir import checkpoints_of, new_run_dir, newest_whole, resolve_checkpoint
from fabricx.trainer.run_request import Job, check_job
from fabricx.trainer.set_up import execute, next_job, ranks_that_began

if TYPE_CHECKING:
    from fabricx.trainer.interface import TrainerInterface


T = TypeVar("T")
_FITS: Final = itertools.count()  # calls of `fit` in this process


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
            immediately in an evaluation.
        KeyboardInterrupt: Ctrl-C in an evaluation.
    """
    results = _run(trainer, job)
    if trainer.terminated:
        raise SystemExit(TERMINATED)
    return results


def _run(trainer: TrainerInterface, job: Job) -> Any:
    check_job(trainer, job)
    trainer.stop.interrupted = trainer.stop.terminated = False
    if job.stage == "fit":
        trainer.stop.requested = trainer.stop.agreed = False
        trainer.stop.boundary = 0
        trainer.state.run = secrets.token_hex(8)  # a checkpoint records the run that saved it
    # The seed is reproducible if the caller has seeded torch.
    trainer.state.seed = trainer.state.seed or torch.initial_seed() % 2**62
    if (server := _server_of_cluster(trainer)) is not None:
        return _serve_in_cluster(trainer, job, server)
    here = worlds.current() or _join_cluster(trainer)
    if here is None and _has_workers(trainer, job):
        check_script(type(job.module))
        if job.stage == "fit":
            check_before_pickling(job.module)
    if here is not None and here.size > 1 and not _is_launched():
        _refuse_missing_servers(trainer, job)
    with contextlib.ExitStack() as stack:
        if job.stage == "fit" and here is not None:
            _resume_launch(trainer, job, here, stack)
        _prepare_run_dir(trainer, job, here, stack)
        aggregator = _aggregate(trainer, job, here, stack)
        if here is not None and (here.size > 1 or _is_launched()):
            stack.enter_context(_interruptible(trainer, job, (signal.SIGINT, *termination_signals())))
            results = execute(trainer, job, here).results
            if trainer.strategy.traits.lockstep:  # else ranks end independently of each other
                trainer.world.await_departure()  # the script may exit now, and no supervisor keeps this process alive
            return results
        if _has_workers(trainer, job):
            return _in_workers(trainer, job, aggregator)
        device = _device(trainer.device_ids[0], trainer.accelerator)
        stack.enter_context(_interruptible(trainer, job, (signal.SIGINT, *termination_signals())))
        return execute(trainer, job, World(device=device)).results


def _is_launched() -> bool:
    """Return whether torchrun or SLURM has started several processes, including this process."""
    launched = cluster.detect()
    return launched is not None and launched.size > 1


def _refuse_missing_servers(trainer: TrainerInterface, job: Job) -> None:
    """Refuse servers in a world that the user's program has joined: no process of it would serve."""
    if job.stage == "fit" and _serving(trainer).servers:
        raise ValueError(
            f"{type(trainer.strategy).__name__}(servers={_serving(trainer).servers}) needs processes that serve, and "
            "the world that your program has joined has none: call fit outside of that world, so that fabricx starts "
            "workers and servers; or start the script with torchrun and an additional process for each server; or use "
            "ParameterServer(servers=0)"
        )


def _prepare_run_dir(trainer: TrainerInterface, job: Job, here: World | None, stack: contextlib.ExitStack) -> None:
    """Determine the run's folder, lock it, and resolve the checkpoint to start from."""
    # An existing folder is locked first, because another process may use it; a new folder needs a valid checkpoint.
    earlier = trainer.run_dir is not None
    if earlier:
        stack.enter_context(_locked(trainer, job, here))
    job.ckpt_path = _path(_decided_by_main_rank(here, lambda: _text(resolve_checkpoint(trainer, job.ckpt_path))))
    if not earlier:
        trainer.run_dir = _path(_decided_by_main_rank(here, lambda: _text(new_run_dir(Path(trainer.default_root_dir)))))
        stack.enter_context(_locked(trainer, job, here))


def _aggregate(
    trainer: TrainerInterface, job: Job, here: World | None, stack: contextlib.ExitStack
) -> Aggregator | None:
    """Aggregate the records of all ranks during training, for warnings, TensorBoard and the report."""
    aggregator = None
    if job.stage != "fit" or not trainer.writes or not trainer.enable_telemetry:
        return None
    assert trainer.run_dir is not None
    if here is None or here.main_rank:
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        board = any(logger.shows_telemetry for logger in trainer.loggers)
        with full_disk_costs("the records of this run"):
            aggregator = Aggregator(trainer.run_dir, board=board, separate=here is None and _has_workers(trainer, job))
            stack.push(functools.partial(_stop_aggregating, trainer, aggregator))
    _decided_by_main_rank(here, lambda: None)  # other ranks continue when the records of the run exist
    return aggregator


def _stop_aggregating(
    trainer: TrainerInterface, aggregator: Aggregator, kind: Any, error: BaseException | None, traceback: Any
) -> None:
    stopped = trainer.interrupted or isinstance(error, KeyboardInterrupt)
    aggregator.close("interrupted" if stopped else "success" if error is None else "failed")


def _resume_launch(trainer: TrainerInterface, job: Job, here: World, stack: contextlib.ExitStack) -> None:
    """Resume the run that was in progress when torchrun restarted all processes.

    A marker file in the run's folder identifies the launch and the call of `fit` in the script.
    """
    identity, number = cluster.launch(), next(_FITS)
    policy = recovery_policy_of(trainer.callbacks)
    if identity is None or policy is None or not policy.snapshots:
        return
    mark = f"launch-{identity}-{number}"

    def find_run() -> tuple[str, str | None, int]:
        root = Path(trainer.default_root_dir)
        restarts = launch_store.restarts(here)
        for marker in sorted(root.glob(f"runs/*/recovery/{mark}"), reverse=True) if restarts else ():
            checkpoints = checkpoints_of(marker.parent.parent)
            return str(marker.parent.parent), _text(newest_whole(checkpoints) if checkpoints else None), restarts
        run_dir = trainer.run_dir or new_run_dir(root)
        (run_dir / "recovery").mkdir(parents=True, exist_ok=True)
        (run_dir / "recovery" / mark).touch()
        return str(run_dir), None, 0

    run_dir, newest, restarts = _decided_by_main_rank(here, find_run)
    trainer.run_dir = Path(run_dir)
    trainer.failure_log.errors = ["torchrun has restarted all processes"] * restarts
    if newest is not None:
        job.ckpt_path = as_path(newest)
    if cluster.has_restarts() and trainer.strategy.traits.lockstep and not _serving(trainer).servers:
        stack.enter_context(_hold_memory_checkpoints(here, memory_holder.folder_of(number)))


@contextlib.contextmanager
def _hold_memory_checkpoints(here: World, folder: Path) -> Iterator[None]:
    """Keep in-memory checkpoints in a separate process, for the processes that torchrun starts after a failure."""
    if not here.secret:
        if here.main_rank:
            print(
                "no state is copied to memory: copies from other machines are unpickled, which needs a key "
                "(FABRICX_KEY_FILE; see docs/security.md). After a restart by torchrun the run continues from its "
                "newest checkpoint", file=sys.stderr, flush=True,
            )  # fmt: skip
        yield
        return
    # A slot for each rank of this machine, and a slot for the copy of a rank on another machine.
    slots = range(2 * here.local_size)
    names = {
        slot: [memory_checkpoint.path_of("", slot, number).name for number in range(memory_checkpoint.NEWEST)]
        for slot in slots
    }
    if here.local_rank == 0:
        memory_holder.start(folder, [name for slot_names in names.values() for name in slot_names])
    here.barrier()
    rank_names = [*names[here.local_rank], *names[here.local_size + here.local_rank]]
    if all(here.gather_objects(memory_holder.is_kept(folder, rank_names))):
        enter_membership(Membership(here.rank, str(folder), slot=here.local_rank))
    elif here.main_rank:
        print(
            f"no memory is held in {folder}, which may belong to another user: after a restart by torchrun the run "
            "continues from its newest checkpoint", file=sys.stderr, flush=True,
        )  # fmt: skip
    try:
        yield
    finally:
        enter_membership(Membership())
    if here.local_rank == 0:  # but not after an error: torchrun may restart the processes
        memory_holder.end(folder)


def _locked(trainer: TrainerInterface, job: Job, here: World | None) -> contextlib.AbstractContextManager[None]:
    """Return the lock of the run's folder; a null context if this process writes no folder."""
    if job.stage != "fit" or not trainer.writes or (here is not None and not here.main_rank):
        return contextlib.nullcontext()
    assert trainer.run_dir is not None
    return exclusive_run(trainer.run_dir, ELASTIC if here is None and _elastic(trainer, job) is not None else "")


def _decided_by_main_rank(here: World | None, decide: Callable[[], T]) -> T:
    """Return the decision of the main rank (plain data) on every rank; an error of the decision also raises on all."""
    if here is None or here.size == 1:
        return decide()
    decided: T | None = None
    error: Exception | None = None
    if here.main_rank:
        try:
            decided = decide()
        except (ValueError, CheckpointError) as caught:
            error = caught
    damaged, text = isinstance(error, CheckpointError), None if error is None else str(error)
    decided, damaged, text = here.broadcast_object((decided, damaged, text))
    if text is not None:
        raise error or (CheckpointError if damaged else ValueError)(text)
    return cast(T, decided)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else as_path(text)


def _join_cluster(trainer: TrainerInterface) -> World | None:
    """Join the world of a launch by torchrun or SLURM and return it; None without such a launch."""
    launched = cluster.detect()
    if launched is None or launched.size == 1:
        if trainer.num_nodes > 1:
            raise ValueError(
                f"num_nodes={trainer.num_nodes}, but no launcher has started processes on all nodes; start the script "
                "with `torchrun --nnodes ... --nproc-per-node ... script.py`, or with srun"
            )
        return None
    workers = launched.size - _serving(trainer).servers
    launched = replace(
        launched, size=workers, local_size=min(launched.local_size, workers - (launched.rank - launched.local_rank))
    )
    if trainer.devices_given and launched.local_size and len(trainer.device_ids) != launched.local_size:
        raise ValueError(
            f"devices={len(trainer.device_ids)}, but {launched.local_size} processes were started on this machine; "
            "set devices to 'auto' or to that number"
        )
    atexit.register(worlds.leave)  # a process that exits while its group's threads run may abort
    return enter(trainer, _connected(trainer, launched))


def _connected(trainer: TrainerInterface, launched: World) -> World:
    """Return the world of a launch with its store.

    Raises:
        ValueError: workers on several machines exchange messages that need a key, and no key is set.
    """
    world = launch_store.connect(launched)
    if _serving(trainer).link and not world.secret:
        raise ValueError(
            f"{type(trainer.strategy).__name__} on several machines needs a key: without it, any program that "
            "reaches a process of the run could execute code in it. Run `umask 077; openssl rand -hex 32 > key` and "
            "set FABRICX_KEY_FILE=key (a path) for all processes (docs/security.md)"
        )
    return world


def enter(trainer: TrainerInterface, world: World) -> World:
    """Select the device of a rank and join its process group.

    Args:
        trainer: determines the device and the backend.
        world: has a store; a newcomer joins later.

    Returns:
        the world, with device and backend.
    """
    ids = trainer.device_ids
    number = ids[world.local_rank] if world.local_rank < len(ids) else world.local_rank
    device = _device(number, trainer.accelerator)
    world = replace(world, device=device, backend="nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.newcomer:  # joins when the membership changes
        return world
    world.join()
    return world


def _work(world: World, trainer: TrainerInterface, job: Job) -> Outcome | None:
    """Run a job in a worker; returns the outcome on the main rank only, for the caller."""
    world = enter(trainer, world)
    # The supervisor handles Ctrl-C; other signals may be sent to a single rank.
    with _interruptible(trainer, job, termination_signals()):
        outcome = execute(trainer, job, world)
    weights = as_part(trainer.strategy, ShardsWeights).whole_weights(job.module)
    if trainer.strategy.traits.lockstep:  # else ranks end independently of each other
        trainer.world.await_departure()
    return outcome.portable(trainer, weights) if trainer.world.main_rank else None


def _in_workers(trainer: TrainerInterface, job: Job, aggregator: Aggregator | None) -> Any:
    from fabricx.launch.supervisor import run_workers

    # The folder exists before the workers start, so that all use the same folder.
    if not trainer.fast_dev_run and job.stage == "fit":
        assert trainer.run_dir is not None
        provenance.write(trainer.run_dir, None)  # this process has the user's command line
    named = {"module": job.module, "trainer": trainer, "train_dataloaders": job.train, "dataloaders": job.evaluate,
             "datamodule": job.datamodule}  # fmt: skip
    trainer.failure_log.errors = []
    trainer.log_settings = LogSettings.of_this_process()
    elastic = _elastic(trainer, job)
    serve = functools.partial(
        _serve, records=_records(trainer, aggregator), network=_serving(trainer).link == "gloo"
    )  # fmt: skip
    while True:
        job.began_with = ranks_that_began(job)
        try:
            outcome = run_workers(
                _work, (trainer, job), size=len(trainer.device_ids), named=named, servers=_servers(trainer, job),
                serve=serve, elastic=elastic, failures=trainer.failures, run_dir=trainer.run_dir,
                note=None if aggregator is None else aggregator.record_event,
                stops_at_step=job.stage == "fit", **_limits(trainer, elastic),
            )[0]  # fmt: skip
        except WorkerFailed as error:
            _report_lost_checkpoint(aggregator, error)
            if isinstance(error.__cause__, SystemExit) and error.__cause__.code == TERMINATED:
                raise SystemExit(TERMINATED) from None  # a signal to a rank has ended an evaluation
            if job.stage != "fit" and error.__cause__ is None:  # killed: the failure may not recur, unlike an error
                error.add_remedy(
                    f"{job.stage} does not recover from the failure of a worker: call it again. The weights and "
                    "checkpoints are unchanged"
                )
            if job.stage != "fit" or error.stopping or not _restarts(trainer, job, aggregator, error):
                raise
        else:
            outcome.absorb(trainer, job)
            return outcome.results


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


def _elastic(trainer: TrainerInterface, job: Job) -> ElasticPolicy | None:
    """Return the rules by which workers continue after the death of a worker; None without recovery in place."""
    if job.stage != "fit" or not trainer.strategy.traits.elastic:
        return None
    if not _has_workers(trainer, job):
        return None
    if not trainer.strategy.traits.lockstep:  # ranks do not wait for each other
        return ElasticPolicy()
    policy = recovery_policy_of(trainer.callbacks)
    if policy is None:
        return None
    return ElasticPolicy(
        policy.patience, policy.min_ranks, policy.max_restarts, not trainer.strategy.traits.replicated
    )  # fmt: skip


def _limits(trainer: TrainerInterface, elastic: ElasticPolicy | None) -> dict[str, Any]:
    """Return the supervisor's timeouts for silent workers, in seconds, by name; a missing name keeps the default."""
    limits: dict[str, Any] = {}
    if (policy := recovery_policy_of(trainer.callbacks)) is not None:
        wanted = {"frozen_after": policy.frozen_after, "stuck_after": policy.stuck_after}
        limits = {name: seconds for name, seconds in wanted.items() if seconds is not None}
    if trainer.accelerator == "cuda" and elastic is not None:  # torch does not end collectives of such a group
        limits.setdefault("stuck_after", OPERATION.total_seconds())
    return limits


def _restarts(trainer: TrainerInterface, job: Job, aggregator: Aggregator | None, error: WorkerFailed) -> bool:
    """Prepare a restart from the newest checkpoint of the run; returns False if no callback requests a restart."""
    assert trainer.run_dir is not None
    checkpoints = checkpoints_of(trainer.run_dir)
    path = newest_whole(checkpoints) if checkpoints else job.ckpt_path
    step = read_manifest(newest_whole(checkpoints))["step"] if checkpoints else -1
    if not any(callback.restarts_after(error, step) for callback in trainer.callbacks):
        return False
    lines = [line for line in str(error).splitlines() if line]
    last = [line for line in error.traceback.splitlines() if line][-1]
    what = f"{lines[0]} {last}"[:300]
    trainer.failures.append(what)
    trainer.failure_log.newest_at = time.time()
    if aggregator is not None:
        again = max(0, aggregator.run.steps - max(0, step))
        aggregator.record_event("failure", str(error), steps_again=float(again))
    print(f"{what}\nall workers restart from step {max(0, step)}", file=sys.stderr, flush=True)
    job.ckpt_path = path
    return True


def _has_workers(trainer: TrainerInterface, job: Job) -> bool:
    """Return whether a job outside of a launch needs worker processes."""
    return len(trainer.device_ids) * trainer.num_nodes > 1 or _servers(trainer, job) > 0


def _servers(trainer: TrainerInterface, job: Job) -> int:
    return _serving(trainer).servers if job.stage == "fit" else 0


def _server_of_cluster(trainer: TrainerInterface) -> World | None:
    """Return the world of the launch if this process is a server, as its last ranks are; None in a worker.

    Raises:
        ValueError: no process would train.
    """
    servers, launched = _serving(trainer).servers, cluster.detect()
    if not servers or launched is None or launched.size == 1:
        return None
    if launched.size <= servers:
        raise ValueError(
            f"{launched.size} processes were started, and servers={servers}: start {servers} processes and an "
            "additional process for each worker"
        )
    return launched if launched.rank >= launched.size - servers else None


def _serve_in_cluster(trainer: TrainerInterface, job: Job, launched: World) -> list[Any]:
    """Serve the workers of a launch; a server has no results."""
    workers = launched.size - _serving(trainer).servers
    # Without a store: this process does not communicate with the workers as a rank.
    server = trainer.serve_as(World(rank=launched.rank, local_rank=launched.local_rank, job=next_job()))
    # Connect also for an evaluation, because the workers wait for all processes of the launch.
    world = replace(_connected(trainer, launched), size=workers, job=server.job)
    if job.stage == "fit":
        network = launched.local_size < launched.size or _serving(trainer).link == "gloo"
        _serve(world, launched.rank - workers, network=network)
    return []


def _records(trainer: TrainerInterface, aggregator: Aggregator | None) -> tuple[Path, bool] | None:
    """Return the folder for the servers' records, and whether they trace each gradient; None without telemetry."""
    if aggregator is None:
        return None
    return aggregator.run_dir, any(callback.traces for callback in trainer.callbacks)


def _serve(
    world: World, number: int, folder: str | None = None, *, network: bool, records: tuple[Path, bool] | None = None
) -> None:  # fmt: skip
    """Run a server of a job; with a folder for snapshots, it can be restarted after its death.

    Args:
        network: workers connect over gloo, not only over Unix sockets.
    """
    from fabricx.parameter_server.server.process import serve

    assert world.store is not None
    prefix = world.key("exchange")
    run_dir, traces = records or (None, False)
    serve(
        world.store, prefix, world.secret, number, world.size, network=network, folder=folder,
        generation=world.generation, run_dir=run_dir, traces=traces, slot=world.rank,
    )  # fmt: skip


@contextlib.contextmanager
def _interruptible(trainer: TrainerInterface, job: Job, signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Handle signals during a job: stop training at the next step boundary, and an evaluation immediately.

    An evaluation has no state to save. A second signal is handled as it was before the job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}

    def stop(number: int, frame: FrameType | None) -> None:
        for previous, handler in before.items():
            signal.signal(previous, handler)
        if job.stage != "fit":
            stop_now(number)
        print("\nstopping at the next step; press Ctrl-C again to stop immediately", file=sys.stderr, flush=True)
        trainer.request_stop("interrupted" if number == signal.SIGINT else "terminated")

    for number in signals:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _device(local_rank: int, accelerator: str) -> torch.device:
    return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device(accelerator)


def _serving(trainer: TrainerInterface) -> HasServers:
    return as_part(trainer.strategy, HasServers)
