"""The ranks of a machine, as child processes of a process that an engine has started there."""

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
from pathlib import Path
from typing import Final

from fabricx import by_value
from fabricx.distributed import authentication
from fabricx.distributed import world as worlds
from fabricx.launch.launcher import Ended
from fabricx.launch.worker import Failure, failure_of
from fabricx.launch.worker_process import failure_of_end
from fabricx.scratch import private_folder

MODULE: Final = "fabricx.trainer.launched_rank"  # main module of a rank
GATHER_S: Final = 5.0  # time after the first failure in which other ranks may report failures
LOOK_S: Final = 0.1  # seconds between two looks at the ranks


class Ranks:
    """The ranks of this machine. They end when this process ends, however it ends.

    Args:
        job: the work of the ranks.
        variables: environment variables of each rank, in addition to those of this process.
    """

    def __init__(self, job: bytes, variables: Sequence[Mapping[str, str]]) -> None:
        self._job, self._variables = job, variables
        self._processes: list[subprocess.Popen[bytes]] = []
        self._early: list[int] = []  # signals that arrived before the ranks started
        self._started = threading.Lock()  # a signal may arrive in another thread

    def run(self) -> Ended:
        """Start the ranks, and wait until all have ended; after a failure the other ranks are killed."""
        with private_folder() as folder:
            authentication.write_private(Path(folder) / "job", self._job)
            try:
                with self._started:
                    for number, own in enumerate(self._variables):
                        self._processes.append(_start(Path(folder) / str(number), {**os.environ, **own}))
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
                process.send_signal(number)

    def kill(self) -> None:
        """Kill the ranks with their child processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _wait(self) -> None:
        deadline = None
        while None in (codes := [process.poll() for process in self._processes]):
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
        return Ended(results[0] if results else None, tuple(failures), stopping=stopped)


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


def _start(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = [sys.executable, "-m", MODULE, str(folder)]
    # In its own session: its child processes can be killed together with it, and no terminal sends it Ctrl-C.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
