"""Decides where a run takes place: in this process, as one rank of a launcher, or in new workers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
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
from fabricx.core.callback import Callback
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
from fabricx.launch.run_lock import only_here
from fabricx.launch.signals import TERMINATED, notices, stop_now
from fabricx.telemetry.aggregator import Aggregator
from fabricx.telemetry.logs import LogSettings
from fabricx.trainer import provenance
from fabricx.trainer.result import Outcome
from fabricx.trainer.run_dir import checkpoints_of, new_run_dir, newest_whole, resolve_checkpoint
from fabricx.trainer.run_request import Job, check_job
from fabricx.trainer.session import execute, next_job, ranks_that_began

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


T = TypeVar("T")
_FITS: Final = itertools.count()  # calls of `fit` in this process


def dispatch(trainer: Trainer, job: Job) -> Any:
    """Run a job where it belongs, and bring back to the caller what it left: weights, metrics, positions.

    Raises:
        SystemExit: with 143, after SIGTERM or a scheduler's notice, once a training run is stopped and saved, and at
            once in an evaluation.
        KeyboardInterrupt: Ctrl-C in an evaluation.
    """
    results = _run(trainer, job)
    if trainer.terminated:
        raise SystemExit(TERMINATED)
    return results


def _run(trainer: Trainer, job: Job) -> Any:
    check_job(trainer, job)
    trainer.interrupted = trainer.terminated = False
    trainer.state.seed = trainer.state.seed or torch.initial_seed() % 2**62  # what the caller has seeded decides
    if (place := _server_of_cluster(trainer)) is not None:
        return _serve_in_cluster(trainer, job, place)
    here = worlds.current() or _join_cluster(trainer)
    if here is None and _has_workers(trainer, job):
        check_script(type(job.module))
        if job.stage == "fit":
            check_before_pickling(job.module)
    if here is not None and here.size > 1 and not _is_launched():
        _refuse_missing_servers(trainer, job)
    with contextlib.ExitStack() as stack:
        if job.stage == "fit" and here is not None:
            _take_up_launch(trainer, job, here, stack)
        _settle_down(trainer, job, here, stack)
        _watch(trainer, job, here, stack)
        if here is not None and (here.size > 1 or _is_launched()):
            stack.enter_context(_interruptible(trainer, job, (signal.SIGINT, *notices())))
            results = execute(trainer, job, here).results
            if trainer.strategy.dealer is None:  # else ranks end when they like
                trainer.world.await_departure()  # the script may end now, and nobody keeps this process alive
            return results
        if _has_workers(trainer, job):
            return _in_workers(trainer, job)
        device = trainer.strategy.device(trainer.device_ids[0], trainer.accelerator)
        stack.enter_context(_interruptible(trainer, job, (signal.SIGINT, *notices())))
        return execute(trainer, job, World(device=device)).results


def _is_launched() -> bool:
    """Return whether torchrun or SLURM has started this process as one of several."""
    found = cluster.detect()
    return found is not None and found.size > 1


def _refuse_missing_servers(trainer: Trainer, job: Job) -> None:
    """Refuse to wait for servers in a world that was joined by hand, in which nobody starts them."""
    if job.stage == "fit" and trainer.strategy.servers:
        raise ValueError(
            f"{type(trainer.strategy).__name__}(servers={trainer.strategy.servers}) needs processes that serve, and a "
            "world that your program has joined has none: call fit outside of that world, so that fabricx starts "
            "workers and servers; or start the script with torchrun and one process more for each server; or use "
            "ParameterServer(servers=0)"
        )


def _settle_down(trainer: Trainer, job: Job, here: World | None, stack: contextlib.ExitStack) -> None:
    """Find the run's folder, keep others out of it, and choose the checkpoint to start from."""
    earlier = trainer.run_dir is not None  # then another process may be in it; a new folder isn't made for nothing
    if earlier:
        stack.enter_context(_alone(trainer, job, here))
    job.ckpt_path = _path(_agreed(here, lambda: _text(resolve_checkpoint(trainer, job.ckpt_path))))
    if not earlier:
        trainer.run_dir = _path(_agreed(here, lambda: _text(new_run_dir(Path(trainer.default_root_dir)))))
        stack.enter_context(_alone(trainer, job, here))


def _watch(trainer: Trainer, job: Job, here: World | None, stack: contextlib.ExitStack) -> None:
    """Read what the ranks record while they train, and write what people look at."""
    trainer.watcher = None
    if job.stage != "fit" or not trainer.writes or not trainer.enable_telemetry:
        return
    assert trainer.run_dir is not None
    if here is None or here.main_rank:
        trainer.run_dir.mkdir(parents=True, exist_ok=True)
        board = any(logger.shows_telemetry for logger in trainer.loggers)
        with full_disk_costs("the records of this run"):
            trainer.watcher = Aggregator(
                trainer.run_dir, board=board, apart=here is None and _has_workers(trainer, job)
            )
            stack.push(functools.partial(_stop_watching, trainer))
    _agreed(here, lambda: None)  # the others come when the run has its id


def _stop_watching(trainer: Trainer, kind: Any, error: BaseException | None, traceback: Any) -> None:
    watcher, trainer.watcher = trainer.watcher, None
    if watcher is not None:
        stopped = trainer.interrupted or isinstance(error, KeyboardInterrupt)
        watcher.close("interrupted" if stopped else "success" if error is None else "failed")


def _take_up_launch(trainer: Trainer, job: Job, here: World, stack: contextlib.ExitStack) -> None:
    """Go on with the run that torchrun's processes were training when it ended them and started these.

    A mark in the run's folder says which launch, and which call of `fit` in the script, it belongs to.
    """
    identity, number = cluster.launch(), next(_FITS)
    if identity is None or not any(
        type(one).restarts_after is not Callback.restarts_after for one in trainer.callbacks
    ):
        return
    mark = f"launch-{identity}-{number}"

    def look() -> tuple[str, str | None, int]:
        root = Path(trainer.default_root_dir)
        restarts = launch_store.restarts(here)
        for place in sorted(root.glob(f"runs/*/recovery/{mark}"), reverse=True) if restarts else ():
            found = checkpoints_of(place.parent.parent)
            return str(place.parent.parent), _text(newest_whole(found) if found else None), restarts
        run_dir = trainer.run_dir or new_run_dir(root)
        (run_dir / "recovery").mkdir(parents=True, exist_ok=True)
        (run_dir / "recovery" / mark).touch()
        return str(run_dir), None, 0

    run_dir, newest, times = _agreed(here, look)
    trainer.run_dir = Path(run_dir)
    trainer.failures = ["torchrun has started all processes again"] * times
    if newest is not None:
        job.ckpt_path = as_path(newest)
    if cluster.starts_again() and trainer.strategy.dealer is None and not trainer.strategy.servers:
        stack.enter_context(_copies_kept(here, memory_holder.folder_of(number)))


@contextlib.contextmanager
def _copies_kept(here: World, folder: Path) -> Iterator[None]:
    """Let what ranks copy to memory outlive them, for the processes that torchrun may start in their place."""
    if not here.secret:
        if here.main_rank:
            print(
                "no state is copied to memory: the copies of other machines are unpickled, and that needs a key "
                "(FABRICX_KEY_FILE; see docs/security.md). After a restart by torchrun the run goes on from its newest "
                "checkpoint", file=sys.stderr, flush=True,
            )  # fmt: skip
        yield
        return
    slots = range(2 * here.local_size)  # of each rank here, and of one of another machine
    names = {
        slot: [memory_checkpoint.path_of("", slot, place).name for place in range(memory_checkpoint.NEWEST)]
        for slot in slots
    }
    if here.local_rank == 0:
        memory_holder.start(folder, [name for own in names.values() for name in own])
    here.barrier()
    mine = [*names[here.local_rank], *names[here.local_size + here.local_rank]]
    if all(here.gather_objects(memory_holder.is_kept(folder, mine))):
        enter_membership(Membership(here.rank, str(folder), slot=here.local_rank))
    elif here.main_rank:
        print(
            f"no memory is held in {folder}, which may belong to another user: after a restart by torchrun the run "
            "goes on from its newest checkpoint", file=sys.stderr, flush=True,
        )  # fmt: skip
    try:
        yield
    finally:
        enter_membership(Membership())
    if here.local_rank == 0:  # after an error torchrun may start the processes again
        memory_holder.end(folder)


def _alone(trainer: Trainer, job: Job, here: World | None) -> contextlib.AbstractContextManager[None]:
    """Return what keeps other runs out of this one's folder, if there will be one."""
    if job.stage != "fit" or not trainer.writes or (here is not None and not here.main_rank):
        return contextlib.nullcontext()
    assert trainer.run_dir is not None
    return only_here(trainer.run_dir, ELASTIC if here is None and _elastic(trainer, job) is not None else "")


def _agreed(here: World | None, decide: Callable[[], T]) -> T:
    """Return what the main rank decides, plain data, or raise its error, on every rank."""
    if here is None or here.size == 1:
        return decide()
    decided: T | None = None
    error: Exception | None = None
    if here.main_rank:
        try:
            decided = decide()
        except (ValueError, CheckpointError) as found:
            error = found
    damaged, text = isinstance(error, CheckpointError), None if error is None else str(error)
    decided, damaged, text = here.broadcast_object((decided, damaged, text))
    if text is not None:
        raise error or (CheckpointError if damaged else ValueError)(text)
    return cast(T, decided)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else as_path(text)


def _join_cluster(trainer: Trainer) -> World | None:
    """Return the world that torchrun or SLURM has started this process in, joined; None if they haven't."""
    found = cluster.detect()
    if found is None or found.size == 1:
        if trainer.num_nodes > 1:
            raise ValueError(
                f"num_nodes={trainer.num_nodes}, but nothing has started a process on each node; start the script with "
                "`torchrun --nnodes ... --nproc-per-node ... script.py`, or with srun"
            )
        return None
    workers = found.size - trainer.strategy.servers
    found = replace(found, size=workers, local_size=min(found.local_size, workers - (found.rank - found.local_rank)))
    if trainer.devices_given and found.local_size and len(trainer.device_ids) != found.local_size:
        raise ValueError(
            f"devices={len(trainer.device_ids)}, but {found.local_size} processes were started on this machine; leave "
            "devices at 'auto', or start as many"
        )
    atexit.register(worlds.leave)  # a process that ends with its group's threads running may abort
    return enter(trainer, _connected(trainer, found))


def _connected(trainer: Trainer, place: World) -> World:
    """Return a process's place in a launch, with the launch's store.

    Raises:
        ValueError: workers on several machines exchange messages that need a key, and have none.
    """
    world = launch_store.connect(place)
    if trainer.strategy.link and not world.secret:
        raise ValueError(
            f"{type(trainer.strategy).__name__} on several machines needs a key, or any program that reaches a process "
            "of the run could run code in it: umask 077; openssl rand -hex 32 > key; then set FABRICX_KEY_FILE=key (a "
            "path) for all processes (docs/security.md)"
        )
    return world


def enter(trainer: Trainer, world: World) -> World:
    """Give a rank its device and join its process group."""
    ids = trainer.device_ids
    number = ids[world.local_rank] if world.local_rank < len(ids) else world.local_rank
    device = trainer.strategy.device(number, trainer.accelerator)
    world = replace(world, device=device, backend=trainer.strategy.backend(device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.newcomer:  # it will be told when to join
        return world
    world.join()
    return world


def _work(world: World, trainer: Trainer, job: Job) -> Outcome | None:
    """Run a job as one rank; the main rank's outcome goes back to the caller."""
    world = enter(trainer, world)
    with _interruptible(trainer, job, notices()):  # the supervisor cares for Ctrl-C, but anybody may signal one rank
        outcome = execute(trainer, job, world)
    weights = trainer.strategy.whole_weights(trainer.module)
    if trainer.strategy.dealer is None:  # else ranks end when they like, and need no other one
        trainer.world.await_departure()
    return outcome.portable(trainer, weights) if trainer.world.main_rank else None


def _in_workers(trainer: Trainer, job: Job) -> Any:
    from fabricx.launch.supervisor import run_workers

    # The folder exists before any worker does, so that all of them find the same one.
    if not trainer.fast_dev_run and job.stage == "fit":
        assert trainer.run_dir is not None
        provenance.write(trainer.run_dir, None)  # here is the command that the user gave
    named = {"module": job.module, "trainer": trainer, "train_dataloaders": job.train, "dataloaders": job.evaluate,
             "datamodule": job.datamodule}  # fmt: skip
    trainer.failures = []
    trainer.log_settings = LogSettings.of_this_process()
    elastic = _elastic(trainer, job)
    while True:
        job.began_with = ranks_that_began(job)
        try:
            outcome = run_workers(
                _work, (trainer, job), size=len(trainer.device_ids), named=named, servers=_servers(trainer, job),
                serve=functools.partial(_serve, records=_records(trainer), network=trainer.strategy.link == "gloo"),
                elastic=elastic, failures=trainer.failures, run_dir=trainer.run_dir,
                note=None if trainer.watcher is None else trainer.watcher.note,
                stops_at_step=job.stage == "fit", **_limits(trainer, elastic),
            )[0]  # fmt: skip
        except WorkerFailed as error:
            _say_lost(trainer, error)
            if isinstance(error.__cause__, SystemExit) and error.__cause__.code == TERMINATED:
                raise SystemExit(TERMINATED) from None  # a rank was asked to end an evaluation
            if job.stage != "fit" or error.stopping or not _starts_again(trainer, job, error):
                raise
        else:
            outcome.absorb(trainer, job)
            return outcome.results


def _say_lost(trainer: Trainer, error: WorkerFailed) -> None:
    """Say that a checkpoint was lost that a hook had asked for, and that was being written when the workers ended."""
    if error.saving is None:
        return
    path, step = as_path(error.saving[0]), error.saving[1]
    if is_committed(path) and read_manifest(path).get("step") == step:
        return
    text = (
        f"the checkpoint {path} was lost: it was being written at step {step} when a worker failed, and is not there "
        "unless a hook saves it again"
    )
    if trainer.watcher is not None:
        trainer.watcher.note("checkpoint", text)
    print(text, file=sys.stderr, flush=True)


def _elastic(trainer: Trainer, job: Job) -> ElasticPolicy | None:
    """Return how workers go on when some die; None where they can't, or where nobody wants it."""
    if job.stage != "fit" or not trainer.strategy.traits.elastic:
        return None
    if not _has_workers(trainer, job):
        return None
    if trainer.strategy.dealer is not None:  # nobody waits for anybody
        return ElasticPolicy()
    for one in trainer.callbacks:
        if one.patience is not None:
            return ElasticPolicy(one.patience, one.min_ranks, one.max_restarts, not trainer.strategy.traits.alike)
    return None


def _limits(trainer: Trainer, elastic: ElasticPolicy | None) -> dict[str, Any]:
    """Return how long the supervisor is to wait for workers that may be replaced, where callbacks say so."""
    found = {}
    for name in ("frozen_after", "stuck_after"):
        wanted = [getattr(callback, name) for callback in trainer.callbacks if getattr(callback, name) is not None]
        if wanted:
            found[name] = min(wanted, key=lambda seconds: math.inf if isinstance(seconds, str) else seconds)
    if trainer.accelerator == "cuda" and elastic is not None:  # torch ends no collective of such a group by itself
        found.setdefault("stuck_after", OPERATION.total_seconds())
    return found


def _starts_again(trainer: Trainer, job: Job, error: WorkerFailed) -> bool:
    """Let the job begin with the newest checkpoint of its own run, if a callback wants to go on after an error."""
    assert trainer.run_dir is not None
    found = checkpoints_of(trainer.run_dir)
    path = newest_whole(found) if found else job.ckpt_path
    step = read_manifest(newest_whole(found))["step"] if found else -1
    if not any(callback.restarts_after(error, step) for callback in trainer.callbacks):
        return False
    lines = [line for line in str(error).splitlines() if line]
    last = [line for line in error.traceback.splitlines() if line][-1]
    what = f"{lines[0]} {last}"[:300]
    trainer.failures.append(what)
    trainer.failed_at = time.time()
    if trainer.watcher is not None:
        again = max(0, trainer.watcher.run.steps - max(0, step))
        trainer.watcher.note("failure", str(error), steps_again=float(again))
    print(f"{what}\nall workers start again from step {max(0, step)}", file=sys.stderr, flush=True)
    job.ckpt_path = path
    return True


def _has_workers(trainer: Trainer, job: Job) -> bool:
    """Return whether a job that nobody else has launched takes processes of its own."""
    return len(trainer.device_ids) * trainer.num_nodes > 1 or _servers(trainer, job) > 0


def _servers(trainer: Trainer, job: Job) -> int:
    return trainer.strategy.servers if job.stage == "fit" else 0


def _server_of_cluster(trainer: Trainer) -> World | None:
    """Return this process's place if it is one of the last ones, which serve; None if it is a worker's.

    Raises:
        ValueError: no process would be left to train.
    """
    servers, found = trainer.strategy.servers, cluster.detect()
    if not servers or found is None or found.size == 1:
        return None
    if found.size <= servers:
        raise ValueError(
            f"{found.size} processes were started, and servers={servers} of them serve: start {servers} and one for "
            "each worker"
        )
    return found if found.rank >= found.size - servers else None


def _serve_in_cluster(trainer: Trainer, job: Job, place: World) -> list[Any]:
    """Serve, where the workers train; there is no result here."""
    workers = place.size - trainer.strategy.servers
    trainer.world = World(rank=place.rank, local_rank=place.local_rank, job=next_job())  # speaks to nobody
    world = replace(_connected(trainer, place), size=workers, job=trainer.world.job)  # workers wait for all processes
    if job.stage == "fit":
        _serve(world, place.rank - workers, network=place.local_size < place.size or trainer.strategy.link == "gloo")
    return []


def _records(trainer: Trainer) -> tuple[Path, bool] | None:
    """Return where servers tell of themselves, if they do, and whether of each gradient."""
    if trainer.watcher is None:
        return None
    return trainer.watcher.run_dir, any(callback.traces for callback in trainer.callbacks)


def _serve(
    world: World, number: int, folder: str | None = None, *, network: bool, records: tuple[Path, bool] | None = None
) -> None:  # fmt: skip
    """Be a server of one job; with a folder for snapshots, one that died is started again.

    Args:
        network: workers come over gloo, not only over Unix sockets.
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
def _interruptible(trainer: Trainer, job: Job, signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Handle signals while a job runs: they stop training at the next step boundary, and an evaluation at once.

    An evaluation has nothing to save. A second signal has the effect that it had before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}

    def stop(number: int, frame: FrameType | None) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        if job.stage != "fit":
            stop_now(number)
        print("\nstopping at the next step; once more stops at once", file=sys.stderr, flush=True)
        trainer.request_stop("interrupted" if number == signal.SIGINT else "terminated")

    for number in signals:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
