"""Ranks that persist between tests: processes that are started once, and run many jobs.

`warm_ranks` (a fixture) makes `run_workers` pass its jobs to them. Each job has its own store, process group, folder
and random numbers, as in new ranks; leaks of a job in a rank fail its test. A rank that fails or hangs ends its pool,
and the next job starts a new pool. Jobs with elastic workers start new ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import pickle
import random
import secrets
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from multiprocessing import active_children, resource_tracker
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from fabricx import by_value
from fabricx.by_value.definitions import DEFINITIONS
from fabricx.distributed import world as worlds
from fabricx.distributed.activity import heartbeat
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.launch import supervisor, worker
from fabricx.launch.worker import WorkerSpec
from fabricx.scratch import private_folder
from fabricx.trainer import set_up
from fabricx.trainer.trainer import Trainer

MOST: Final = 6  # number of kept pools
GRACE_S: Final = 20.0  # grace period for ending threads
CHILDREN_IN_PROC: Final = Path(f"/proc/self/task/{os.getpid()}/children").exists()
LIMITS: Final = ("frozen_after", "stuck_after")  # limits of silence after which FaultRecovery ends a rank
_START_RANKS: Final = supervisor.run_workers


class Pool:
    """A fixed number of ranks and servers that run jobs until one of the processes fails.

    Args:
        size: ranks.
        servers: processes in addition to the servers of each job.
    """

    def __init__(self, size: int, servers: int) -> None:
        self.size, self._error = size, None
        self._open = contextlib.ExitStack()
        folder = self._open.enter_context(private_folder())
        before = set(threading.enumerate())
        address, key = f"{folder}/jobs", secrets.token_bytes(16)
        with Listener(address, "AF_UNIX", backlog=size + servers, authkey=key) as listener:
            serve = functools.partial(_serve_jobs, address=address, authkey=key)
            options = {"size": size, "servers": servers, "serve": serve}
            self._thread = threading.Thread(target=self._supervise, args=((address, key), options), name="warm ranks")
            self._thread.daemon = True
            self._thread.start()
            connections = [listener.accept() for _ in range(size + servers)]
        hellos = {connection.recv(): connection for connection in connections}
        self._connections: list[Connection] = [hellos[hello] for hello in sorted(hellos)]
        self.threads = set(threading.enumerate()) - before
        self.pids = [pid for _, pid in sorted(hellos)]

    def _supervise(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            _START_RANKS(_take_jobs, arguments, **options)
        except BaseException as error:
            self._error = error

    def run(self, function: Any, arguments: tuple[Any, ...], named: Any, serve: Any) -> list[Any]:
        """Run a job on all ranks; return the results by rank.

        Raises:
            WorkerFailed: a rank failed; the pool has ended.
            AssertionError: the job has leaked resources in a rank.
        """
        with private_folder() as folder, contextlib.ExitStack() as stack:
            supervisor._write_job(Path(folder), function, arguments, named or {})
            key = secrets.token_bytes(32)
            store = StoreServer(folder, key)
            stack.callback(store.close)
            path = tuple(entry or os.path.abspath(entry) for entry in sys.path)
            spec = WorkerSpec(0, self.size, store.path, key, folder, path, os.getcwd())
            answers: list[Any] = []
            try:
                for rank, connection in enumerate(self._connections):
                    connection.send(replace(spec, rank=rank, serve=serve if rank >= self.size else None))
                answers += [connection.recv() for connection in self._connections]
            except (EOFError, OSError):
                self.close()
            except BaseException:  # such as this test's timeout
                self.close()
                raise
        if not answers:  # raised here, because it has its own cause
            raise self._error or RuntimeError("warm ranks ended without an error")
        left = [f"rank {rank}: {leak}" for rank, (_, leaks) in enumerate(answers) for leak in leaks]
        if left:
            self.close()
        assert not left, "the job left behind in its ranks:\n  " + "\n  ".join(left)
        return [pickle.loads(result) for result, _ in answers[: self.size]]

    def close(self) -> None:
        """End all processes."""
        if self in _POOLS.values():
            _POOLS.pop(next(key for key, pool in _POOLS.items() if pool is self))
        if self._error is None and self._thread.is_alive():
            self._thread.join(2 * supervisor.GATHER_S)  # a rank has failed: other ranks may still report
        for pid in self.pids if self._thread.is_alive() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._thread.join(30)
        for connection in self._connections:
            connection.close()
        self._open.close()


_POOLS: dict[tuple[int, int], Pool] = {}


@atexit.register
def close() -> None:
    """End all pools."""
    for pool in list(_POOLS.values()):
        pool._error = pool._error or SystemExit()
        pool.close()


def processes() -> set[int]:
    """Return the processes that are kept for later jobs."""
    return {pid for pool in _POOLS.values() for pid in pool.pids}


def children(pid: int) -> list[int]:
    """Return a process's children; psutil would read all processes of the machine."""
    tasks = Path(f"/proc/{pid}/task")
    if not CHILDREN_IN_PROC:
        return [process.pid for process in psutil.Process(pid).children()]
    try:
        lists = [(tasks / task / "children").read_text().split() for task in os.listdir(tasks)]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended in the meantime
    return [int(number) for numbers in lists for number in numbers]


def threads() -> set[threading.Thread]:
    """Return the threads of this process that supervise the pools."""
    return {thread for pool in _POOLS.values() for thread in pool.threads}


def run_workers(function: Any, arguments: tuple[Any, ...], **options: Any) -> list[Any]:
    """Run `fabricx.launch.supervisor.run_workers` on existing ranks if possible."""
    if _recovers_by_default(arguments[0]):
        options.pop("elastic", None)
        options = {name: value for name, value in options.items() if name not in LIMITS}
    supported = {"size", "servers", "serve", "named", "elastic", "failures", "run_dir", "note", "stops_at_step"}
    if options.get("elastic") is not None or options.keys() - supported:
        return _START_RANKS(function, arguments, **options)
    key = options["size"], options.get("servers", 0)
    pool = _POOLS.pop(key, None) or Pool(*key)
    _POOLS[key] = pool  # the most recently used pool is ended last
    while len(_POOLS) > MOST:
        oldest = next(iter(_POOLS.values()))
        oldest._error = SystemExit()
        oldest.close()
    return pool.run(function, arguments, options.get("named"), options.get("serve"))


def _recovers_by_default(job: Any) -> bool:
    """Return whether ranks would be replaced by default only; the default has its own tests."""
    if not isinstance(job, Trainer) or not job.strategy.traits.lockstep:
        return False
    chosen = ("snapshots", "stuck_after")  # set by tests of recovery
    return not any(getattr(callback, name, None) for callback in job.callbacks for name in chosen)


def _take_jobs(world: World, address: str, authkey: bytes) -> None:
    _work(address, authkey, world.rank)


def _serve_jobs(world: World, number: int, folder: str, *, address: str, authkey: bytes) -> None:
    _work(address, authkey, world.size + number)


def _work(address: str, authkey: bytes, rank: int) -> None:
    """Run jobs, one by one, as a rank or a server."""
    fresh = _Fresh()
    with Client(address, "AF_UNIX", authkey=authkey) as connection:
        connection.send((rank, os.getpid()))
        while True:
            spec = connection.recv()
            fresh.restore()
            DEFINITIONS.reads_job = True
            sys.path[:] = [*spec.sys_path, *(entry for entry in sys.path if entry not in spec.sys_path)]
            os.chdir(spec.cwd)
            with warnings.catch_warnings():
                result = by_value.dumps(worker._run(spec), home=True)
            by_value.share(())
            heartbeat.set_reached(0)  # a rank without a job isn't a rank without progress
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send((result, fresh.leaks()))


class _Fresh:
    """The state of a process before its first job."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._environment = dict(os.environ)
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._switches = _switches()

    def restore(self) -> None:
        """Restore the state of a new process for the next job."""
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        set_up._JOBS = itertools.count()
        heartbeat.set_reached(0)
        heartbeat._JOINED[0] = 0
        worlds.WAITED_S[0] = 0.0
        torch._dynamo.reset()

    def leaks(self) -> list[str]:
        """Return the leaks of a job."""
        deadline = time.monotonic() + GRACE_S
        while (threads := set(threading.enumerate()) - self._threads) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        leaks = [f"thread {thread.name}" for thread in threads]
        active_children()  # reaps ended processes
        kept = {resource_tracker._resource_tracker._pid}
        leaks += [f"process {child}" for child in children(os.getpid()) if child not in kept]
        leaks += ["a process group"] if torch.distributed.is_initialized() else []
        allowed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}  # set by each job
        allowed |= {"GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR"}
        allowed |= {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
        changed = {name for name, value in {*os.environ.items()} ^ {*self._environment.items()}} - allowed
        leaks += [f"environment: {name}" for name in sorted(changed)]
        return leaks + [f"{name} is {value}" for name, value in _switches().items() if value != self._switches[name]]


def _switches() -> dict[str, Any]:
    return {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
    }
