"""A run in the processes of a launch: torchrun, MPI, SLURM or SageMaker has started this process."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from fabricx.core.module_state.rng import RandomState
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.distributed import world as worlds
from fabricx.distributed.membership.generations import Membership
from fabricx.distributed.membership.generations import enter as enter_membership
from fabricx.distributed.world import World
from fabricx.fault_tolerance import memory_checkpoint, memory_holder
from fabricx.launch import cluster, launch_store, launch_watch
from fabricx.launch.launch_store import Attempt
from fabricx.launch.lost_ranks import LostRanks
from fabricx.launch.worker import exit_now
from fabricx.trainer import process
from fabricx.trainer.run_dir import checkpoints_of, new_run_dir, newest_whole

if TYPE_CHECKING:
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.strategy import Strategy

_FITS: Final = itertools.count()  # calls of `fit` in this process
_RANDOM: Final = "random-"  # before the name of a marker: file with the random state of its first attempt


def is_launched(num_nodes: int = 1) -> bool:
    """Return whether a launcher has started several processes, including this process, or had started them before.

    Args:
        num_nodes: number of machines at the start of the run: torchrun with `--nnodes 1:2` may restart the rank of a
            single machine after the loss of the other.
    """
    launched = cluster.detect()
    return launched is not None and (launched.size > 1 or (num_nodes > 1 and cluster.has_restarts()))


def join_launch(options: TrainerOptions, strategy: Strategy) -> World | None:
    """Join the world of a launch.

    Args:
        options: the run's options.
        strategy: the run's strategy; the last processes of the launch are its servers.

    Returns:
        the world, with device and process group; None without such a launch.

    Raises:
        ValueError: options and launch contradict each other.
    """
    launched, servers = cluster.detect(), as_part(strategy, HasServers).servers
    if launched is None or launched.size <= servers or not is_launched(options.num_nodes):
        if options.num_nodes > 1:
            raise ValueError(
                f"num_nodes={options.num_nodes}, but no launcher has started processes on all nodes; start the script "
                "with `torchrun --nnodes ... --nproc-per-node ... script.py`, with srun, or with mpirun"
            )
        return None
    launched = workers_of(launched, servers)
    if options.devices_given and launched.local_size and len(options.device_ids) != launched.local_size:
        raise ValueError(
            f"devices={len(options.device_ids)}, but {launched.local_size} processes were started on this machine; "
            "set devices to 'auto' or to that number"
        )
    if not options.devices_given and (gpus := cluster.unused_devices()):
        raise ValueError(
            f"this machine has {gpus} GPUs, and SageMaker has started a single process on it: start its job with "
            "distribution={'torch_distributed': {'enabled': True}}, or set devices=1 to use one of the GPUs"
        )
    share_cores(launched.local_size)
    atexit.register(worlds.leave)  # a process that exits while its group's threads run may abort
    return process.enter(options, connected(launched, strategy))


def share_cores(ranks: int) -> None:
    """Use this rank's part of the machine's cores, unless something else has limited its threads.

    torchrun sets OMP_NUM_THREADS, and srun and mpirun may bind a rank to cores of its own. Otherwise each rank would
    have a thread for each core.

    Args:
        ranks: number of ranks on this machine; 0 if unknown.
    """
    cores = len(os.sched_getaffinity(0))
    bound = cores < (os.cpu_count() or cores)
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ and not bound and torch.get_num_threads() == cores:
        torch.set_num_threads(max(1, cores // ranks))


def workers_of(launched: World, servers: int) -> World:
    """Return the world of the workers of a launch.

    Args:
        launched: all processes, with this worker's rank; the last processes are servers.
        servers: number of servers.
    """
    workers, first = launched.size - servers, launched.rank - launched.local_rank
    return replace(launched, size=workers, local_size=min(launched.local_size, workers - first))


def connected(launched: World, strategy: Strategy) -> World:
    """Return the world of a launch with its store.

    Args:
        launched: without a store.
        strategy: the run's strategy.

    Raises:
        ValueError: workers on several machines exchange messages that need a key, and no key is set.
    """
    world = launch_store.connect(launched)
    if as_part(strategy, HasServers).link and not world.secret:
        raise ValueError(
            f"{type(strategy).__name__} on several machines needs a key: without it, any program that "
            "reaches a process of the run could execute code in it. Run `umask 077; openssl rand -hex 32 > key` and "
            "set FABRICX_KEY_FILE=key (a path) for all processes (docs/security.md)"
        )
    return world


def launched_server(servers: int) -> World | None:
    """Return the world of a launch if this process is a server (its last ranks are servers); None in a worker.

    Args:
        servers: number of servers of the strategy.

    Raises:
        ValueError: no process would train.
    """
    launched = cluster.detect()
    if not servers or launched is None or launched.size == 1:
        return None
    if launched.size <= servers:
        raise ValueError(
            f"{launched.size} processes were started, and servers={servers}: start {servers} processes and an "
            "additional process for each worker"
        )
    return launched if launched.rank >= launched.size - servers else None


def serve_launch(strategy: Strategy, launched: World, job: int, *, fits: bool) -> None:
    """Serve the workers of a launch.

    Args:
        strategy: the run's strategy.
        launched: processes of the launch; without a store, since a server does not communicate as a rank.
        job: number of the run in this launch.
        fits: the run trains; an evaluation needs no server.
    """
    serving = as_part(strategy, HasServers)
    workers = launched.size - serving.servers
    # Connect also for an evaluation, because the workers wait for all processes of the launch.
    world = replace(connected(launched, strategy), size=workers, job=job)
    if fits:
        network = launched.local_size < launched.size or serving.link == "gloo"
        process.serve(world, launched.rank - workers, network=network)


def watched(here: World, report: Callable[[Exception], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which hangs of this launch's ranks are reported.

    Args:
        here: this rank among all ranks.
        report: called with the error before a rank that is blocked for ever ends; None to print the error.
    """
    if here.size == 1 or here.store is None or not is_launched():
        return contextlib.nullcontext()

    def end(error: Exception) -> None:
        if report is None:
            print("".join(traceback.format_exception_only(error)), file=sys.stderr, flush=True)
        else:
            report(error)
        exit_now(1)

    return launch_watch.watched(here, end, LostRanks(here) if cluster.has_restarts() else None)


@dataclass(frozen=True)
class Continuation:
    """The run that a launch continues, or its new run.

    Attributes:
        number: number of the call of `fit` in this process.
        run_dir: folder of the run.
        newest: newest intact checkpoint of the run; None to start as the call says.
        restarts: number of restarts of all processes.
    """

    number: int
    run_dir: Path
    newest: str | None
    restarts: int


def continue_launch(here: World, root: Path, run_dir: Path | None) -> Continuation | None:
    """Find the run that was in progress when torchrun restarted all processes.

    A marker file in the run's folder identifies the launch and the call of `fit` in the script. It has the agents of
    the newest attempt, of which at least one started this attempt, too: users may give the same name to two launches.
    The file also counts attempts, because no machine counts all of them.

    The random state of the main rank becomes that of the first attempt, from which all ranks draw in the set-up: a
    script without a seed would draw another split of its data after a restart.

    Args:
        here: all ranks, which call this together.
        root: folder of all runs.
        run_dir: folder of the run, if it is determined already.

    Returns:
        the run; None if torchrun has not started this process.
    """
    identity, number = cluster.launch(), next(_FITS)
    if identity is None:
        return None
    mark = f"launch-{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{number}"  # any characters may be in an id

    def find_run() -> tuple[str, str | None, int]:
        attempt = launch_store.attempt(here)
        markers = {path: _attempt_in(path) for path in root.glob(f"runs/*/recovery/{mark}")}
        same = {path for path, before in markers.items() if set(before.agents) & set(attempt.agents)}
        marker = max(same or (markers if attempt.restarts else ()), default=None)
        if marker is None:
            folder = run_dir or new_run_dir(root)
            (folder / "recovery").mkdir(parents=True, exist_ok=True)
            torch.save(RandomState().state_dict(), folder / "recovery" / f"{_RANDOM}{mark}")
            _write_attempt(folder / "recovery" / mark, replace(attempt, restarts=0))
            return str(folder), None, 0
        restarts = max(attempt.restarts, markers[marker].restarts + 1)
        _write_attempt(marker, replace(attempt, restarts=restarts))
        RandomState.of(torch.load(marker.with_name(f"{_RANDOM}{mark}"), weights_only=True)).restore()
        checkpoints = checkpoints_of(marker.parent.parent)
        newest = str(newest_whole(checkpoints)) if checkpoints else None
        return str(marker.parent.parent), newest, restarts

    folder, newest, restarts = process.decided_by_main_rank(here, find_run)
    return Continuation(number, Path(folder), newest, restarts)


def _attempt_in(marker: Path) -> Attempt:
    """Return the attempt of a marker; without agents if it cannot be read: a rank may have died while it wrote."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Attempt(**json.loads(marker.read_text()))
    return Attempt(0, [])


def _write_attempt(marker: Path, attempt: Attempt) -> None:
    passing = marker.with_name(f".{marker.name}.new")
    passing.write_text(json.dumps(asdict(attempt)))
    passing.rename(marker)


@contextlib.contextmanager
def memory_checkpoints_held(here: World, folder: Path) -> Iterator[None]:
    """Keep in-memory checkpoints in a separate process, for the ranks that the launcher starts after a failure.

    Args:
        here: ranks of the launch.
        folder: folder of the memory, on this machine.
    """
    if not here.secret:
        if here.main_rank:
            print(
                "in-memory checkpoints are off: copies from other machines are unpickled, which needs a key "
                "(FABRICX_KEY_FILE; see docs/security.md). After a restart of all processes the run continues from its "
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
            f"in-memory checkpoints are off: {folder} can't be used, and may belong to another user. After a restart "
            "of all processes the run continues from its newest checkpoint", file=sys.stderr, flush=True,
        )  # fmt: skip
    try:
        yield
    finally:
        enter_membership(Membership())
    if here.local_rank == 0:  # but not after an error: torchrun may restart the processes
        memory_holder.end(folder)
