"""The ranks of a machine, as child processes of a process that an engine has started on it."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import set_forkserver_preload
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Protocol

import torch

from fabricx import by_value
from fabricx.distributed import world as worlds
from fabricx.distributed.messages import authentication
from fabricx.fault_tolerance.memory_checkpointer import newest_step
from fabricx.launch import preloaded, worker_process
from fabricx.launch.fork_server import fork_for_children, starting_without_script, without_script
from fabricx.launch.launcher import Ended
from fabricx.launch.signals import block, blocked
from fabricx.launch.worker import PRELOAD, Failure, exit_now, failure_of
from fabricx.launch.worker_process import failure_of_end
from fabricx.scratch import private_folder

COPIES: Final = "FABRICX_COPIES"  # environment variable of a rank: folder of in-memory checkpoints
MODULE: Final = "fabricx.trainer.launched_rank"  # main module of a rank
GATHER_S: Final = 5.0  # time after the first failure in which other ranks may report failures
FORK_S: Final = 10.0  # longest time in which a fork blocks signals
LOOK_S: Final = 0.1  # seconds between two looks at the ranks


class Ranks:
    """The ranks of this machine. They end when this process ends, however it ends.

    Args:
        job: the work of the ranks.
        variables: environment variables of each rank, in addition to the variables of this process.
        forks: start the ranks from this process's fork server, in a fraction of a second once it has started.
        copies: folder for in-memory checkpoints, which outlive the ranks and end with this process; None without.
    """

    def __init__(
        self, job: bytes, variables: Sequence[Mapping[str, str]], *, forks: bool = False, copies: Path | None = None
    ) -> None:  # fmt: skip
        self._job, self._copies = job, copies
        self._variables = [{**rank, **({} if copies is None else {COPIES: str(copies)})} for rank in variables]
        self._start = _fork if forks else _start
        self._processes: list[_RankProcess] = []
        self._early: list[int] = []  # signals that arrived before the ranks started
        self._started = threading.Lock()  # a signal may arrive in another thread
        self._over = False

    def run(self) -> Ended:
        """Start the ranks, and wait until all have ended; after a failure the other ranks are killed."""
        with private_folder() as folder:
            authentication.write_private(Path(folder) / "job", self._job)
            try:
                with self._started:
                    outer = {name: value for name, value in os.environ.items() if name != COPIES}
                    for number, variables in enumerate(self._variables):
                        (Path(folder) / str(number)).mkdir()
                        self._processes.append(self._start(Path(folder) / str(number), {**outer, **variables}))
                for early in self._early:
                    self.signal(early)
                self._wait()
                return self._ended(Path(folder))
            finally:
                self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks.

        Args:
            number: number of the signal.
        """
        with self._started:
            if not self._processes:
                self._early.append(number)
            for process in self._processes:
                if process.poll() is None:
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill the ranks with their child processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:  # a process that has just been forked leads no group yet
                    os.kill(process.pid, signal.SIGKILL)
            process.close()

    def end(self) -> None:
        """Make `run` kill the ranks and return, without failures of the ranks that it kills."""
        self._over = True

    def _wait(self) -> None:
        deadline = None
        while None in (codes := [process.poll() for process in self._processes]) and not self._over:
            if any(codes) and deadline is None:
                deadline = time.monotonic() + GATHER_S
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)

    def _ended(self, folder: Path) -> Ended:
        failures: list[Failure] = []
        for number, process in enumerate(self._processes):
            report, code = folder / str(number) / "failure", process.poll()
            if report.exists():
                failures.append(pickle.loads(report.read_bytes()))
            elif code:
                rank = int(self._variables[number]["RANK"])
                failures.append(replace(failure_of_end(rank, code, None), at=time.time()))
        results = [file.read_bytes() for file in folder.glob("*/result")]
        stopped = any((folder / str(number) / "stopped").exists() for number in range(len(self._processes)))
        reached = -1 if self._copies is None else newest_step(self._copies)
        return Ended(results[0] if results else None, tuple(failures), stopping=stopped, reached=reached)


def run_rank(job: bytes, rank: int) -> Ended:
    """Run a rank in this process, which an engine has started for it.

    Args:
        job: its work.
        rank: number of the rank; the variables of torchrun are set.

    Returns:
        the result of the main rank, with whether a signal has stopped the run, or the failure.
    """
    try:
        outcome, stopped = importlib.import_module(MODULE).run(job)
        worlds.leave()
        return Ended(by_value.dumps(outcome, home=True) if rank == 0 else None, stopping=stopped)
    except BaseException as error:
        return Ended(failures=(failure_of(rank, error, time.time()),))


class _RankProcess(Protocol):
    """A process of a rank, as the leader of a process group: its child processes can be killed together with it, and
    no terminal sends it Ctrl-C. It ends when this process closes the pipe to it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None if the process runs."""
        ...

    def close(self) -> None:
        """Wait for the end of the process, and release its resources."""
        ...


class _NewProcess:
    """A new interpreter."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid, self.poll = process.pid, process.poll

    def close(self) -> None:
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


class _Fork:
    """A fork of this process's fork server."""

    def __init__(self, process: BaseProcess, alive: Connection) -> None:
        self._process, self._alive = process, alive
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def close(self) -> None:
        self._process.join()
        self._alive.close()


def _start(folder: Path, environment: Mapping[str, str]) -> _RankProcess:
    command = [sys.executable, "-m", MODULE, str(folder)]
    with blocked():
        return _NewProcess(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True))


def _fork(folder: Path, environment: Mapping[str, str]) -> _RankProcess:
    forks = preloaded.context()
    there, alive = forks.Pipe()
    process = forks.Process(target=_run_fork, args=(folder, environment, there))
    with there, starting_without_script():  # the script of this process is the engine's
        worker_process.start(process)
    alive.poll(FORK_S)
    return _Fork(process, alive)


def _run_fork(folder: Path, environment: Mapping[str, str], alive: Connection) -> None:
    """Run a rank in a fork of the fork server, with the environment of a new process."""
    os.setpgrp()  # in the session of the fork server, so that a fork server for loader processes can join the group
    block()
    alive.send_bytes(b"started")
    set_forkserver_preload(PRELOAD)
    without_script()
    fork_for_children()
    os.environ.clear()
    os.environ.update(environment)
    # Also if the number does not change: torch replaces its thread pool at the first such call after a fork.
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    importlib.import_module(MODULE).main(folder, alive.fileno())
    exit_now(0)  # also ends the fork server of loader processes, for which multiprocessing would wait
