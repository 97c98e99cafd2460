"""The main function of a worker process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import set_forkserver_preload
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fabricx import by_value
from fabricx.core.rank_zero import set_rank
from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership import generations
from fabricx.distributed.membership.lost_operations import BlockedMainThread
from fabricx.distributed.membership.lost_peers import is_peer_lost
from fabricx.distributed.messages import authentication
from fabricx.errors import brief_traceback, is_full, last_line
from fabricx.launch import signals
from fabricx.launch.fork_server import fork_for_children, without_script
from fabricx.launch.module_files import find_in_files
from fabricx.launch.process_settings import ProcessSettings
from fabricx.scratch import remove_if_abandoned, sweep

PRELOAD = ["torch.utils.data", "fabricx.launch.fork_server"]
BEAT_S = 0.5  # between two heartbeats
LONG_S = 10.0  # without a further batch, after which heartbeats contain the main thread's source line
SHUT_S = 0.02  # between two checks for open connections of a broken group that the main thread still uses
ABANDONED_S = 1.0  # time for the system to release the lock of a killed process
FAILED = 1  # exit status
ASKED = "diagnosis"  # kind of the supervisor's request for a diagnosis, and of the answer
ENDS = "ends"  # kind of the message of a worker that ends because it cannot continue; the content is the reason
LOST = (
    "an operation of torch.distributed did not end after another worker had died (gloo loses transfers that are "
    "interrupted), so its process ended itself"
)


@dataclass(frozen=True)
class WorkerSpec:
    """Start parameters of a worker or server: plain data, available before the job is unpickled.

    Attributes:
        rank: number of the process: ranks first, then servers, then newcomers.
        size: number of workers at the start of the run.
        store: path of the supervisor's store socket.
        key: secret key of the run.
        folder: private folder of the run, with the job.
        sys_path: import path of the supervisor.
        module_files: files of the supervisor's modules that this path does not lead to, by name.
        cwd: working directory of the supervisor.
        generation: number of restarts, for a server.
        newcomer: the worker joins a running group.
        seat: planned rank of a newcomer.
        device_number: number of a newcomer's device, among those of the run.
        settings: settings of the supervisor's process; None to keep those of the new process.
        elastic: workers may join and leave.
        serve: function of a server; None for workers.
    """

    rank: int
    size: int
    store: str
    key: bytes = field(repr=False)
    folder: str
    sys_path: tuple[str, ...]
    cwd: str
    generation: int = 0
    newcomer: bool = False
    seat: int = 0
    device_number: int = 0
    settings: ProcessSettings | None = None
    module_files: Mapping[str, str] = field(default_factory=dict, repr=False)
    elastic: bool = False
    serve: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Failure:
    """Report of an exception in a worker, or of its death.

    Attributes:
        rank: number of the process.
        at: monotonic time of the failure, seconds.
        kind: class of the exception; "killed" or "death" if the process died.
        traceback: text for users.
        error: the pickled exception; None if it cannot be pickled.
        secondary: the process reports only that another process was lost.
        line: last line of the error, without notes; "" if `traceback` has a single line.
    """

    rank: int
    at: float
    kind: str
    traceback: str
    error: bytes | None
    secondary: bool = False
    line: str = ""

    @property
    def summary(self) -> str:
        """Return the failure in a line."""
        return self.line or self.traceback.rstrip().splitlines()[-1]


def main(spec: WorkerSpec, control: Connection) -> None:
    """Run the job in the supervisor's folder and write its result there; main function of a worker process.

    Args:
        spec: start parameters.
        control: pipe to the supervisor.
    """
    os.setpgrp()  # so that its child processes can be killed together with it
    set_forkserver_preload(PRELOAD)
    without_script()
    fork_for_children()
    if spec.settings is not None:
        spec.settings.apply()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the supervisor handles it
    if spec.serve is not None:  # a server ends after the workers
        signals.ignore()
    pipe = _SupervisorPipe(control)
    pipe.send("beat", (0, False, ""))  # the supervisor monitors heartbeats from now on
    send = pipe.send if spec.elastic else None
    generations.enter(generations.Membership(spec.rank, spec.folder if send else "", send, lambda: exit_now(0)))
    faulthandler.register(signal.SIGUSR2, (Path(spec.folder) / f"stacks-{spec.rank}").open("w"))
    faulthandler.enable((Path(spec.folder) / f"crash-{spec.rank}").open("w"))
    threading.Thread(target=_receive_messages, args=(control, pipe, spec.folder), daemon=True).start()
    threading.Thread(target=pipe.send_heartbeats, daemon=True).start()
    sys.path[:] = [*spec.sys_path, *(entry for entry in sys.path if entry not in spec.sys_path)]
    find_in_files(spec.module_files)
    os.chdir(spec.cwd)
    set_rank(spec.rank)
    try:
        result = _run(spec)
        pipe.send("result", _write_result(result, Path(spec.folder) / f"result-{spec.rank}"))
    except BaseException as error:
        with contextlib.suppress(OSError):  # the supervisor has ended the run
            pipe.send("failure", failure_of(spec.rank, error, time.monotonic()))
        exit_now(FAILED)
    exit_now(0)


def _write_result(result: Any, target: Path) -> str:
    """Write a result for the supervisor, and return the path.

    Raises:
        OSError: the disk is full; the message names the remedy.
    """
    try:
        with target.open("wb") as file:  # without a copy in memory, because a result contains all weights
            by_value.dump(result, file, home=True)
    except OSError as error:
        if not is_full(error):
            raise
        target.unlink()
        text = f"{error.strerror}: the result of this rank doesn't fit into {target.parent}"
        raise OSError(
            error.errno,
            f"{text}; make room there, or set TMPDIR to another folder. The weights are in the checkpoints of the run",
        ) from None
    return str(target)


class _SupervisorPipe:
    """Pipe to the supervisor, shared by the main thread, the heartbeat thread and the receiving thread."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._control.send((kind, content))

    def send_heartbeats(self) -> None:
        """Send heartbeats for ever, with the main thread's progress, and its source line after `LONG_S` without any.

        Also send SIGCONT to this process's group, which includes its fork server and data loader processes: the main
        thread waits for them, and a stopped process would block it for ever. Running processes ignore SIGCONT.
        """
        reached, since = -1, time.monotonic()
        with contextlib.suppress(OSError):  # the supervisor ended, and this process is about to end
            while True:
                if heartbeat.reached() != reached:
                    reached, since = heartbeat.reached(), time.monotonic()
                waits, line = False, ""
                with contextlib.suppress(Exception):  # another thread may change the cache of source lines
                    waits = heartbeat.waits()
                    line = heartbeat.where() if time.monotonic() - since > LONG_S else ""
                self.send("beat", (reached, waits, line))
                os.killpg(0, signal.SIGCONT)
                time.sleep(BEAT_S)


def _run(spec: WorkerSpec) -> Any:
    import torch

    from fabricx.distributed import world as worlds
    from fabricx.distributed.store.client import PrivateStore

    # Called even if the number does not change: torch replaces its thread pool at the first such call after a fork, and
    # two autograd threads that make this call simultaneously fail with "Invalid thread pool!".
    share = max(1, len(os.sched_getaffinity(0)) // spec.size)
    torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else share)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine: no name resolution needed
    world = worlds.World(
        rank=spec.rank,
        size=1 if spec.newcomer else spec.size,
        local_rank=spec.seat if spec.newcomer else spec.rank,
        local_size=spec.size,
        generation=spec.generation,
        store=PrivateStore(spec.store, spec.key),
        secret=spec.key,
        newcomer=spec.newcomer,
        device_number=spec.device_number if spec.newcomer else None,
    )
    if spec.serve is not None:
        return spec.serve(world, spec.rank - spec.size, spec.folder)
    with authentication.open_private(Path(spec.folder) / "job") as file:
        function, arguments = pickle.load(file)
    by_value.supply_children()
    os.environ.update(world.variables)  # as under torchrun: streams and libraries read them
    try:
        return function(world, *arguments)
    finally:
        if sys.exc_info()[0] is None:  # after an error peers may never answer; the process's end closes the sockets
            worlds.leave()


def failure_of(rank: int, error: BaseException, time_s: float) -> Failure:
    """Return the report of a failure, with the error if it can be pickled.

    Args:
        rank: number of the process.
        error: ended its work.
        time_s: when, in seconds of a clock that all reports share.
    """
    text = brief_traceback(error)
    try:
        pickled = by_value.dumps(error, home=True)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(rank, time_s, type(error).__name__, text, pickled, is_peer_lost(error), last_line(error))


def _receive_messages(control: Connection, pipe: _SupervisorPipe, folder: str) -> None:
    """Handle messages of the supervisor. When its end of the pipe closes, it died: kill this process's group."""
    membership = generations.membership()
    busy, blocked = False, BlockedMainThread()
    try:
        while True:
            if control.poll(SHUT_S if busy else None):
                kind, content = control.recv()
                if kind == ASKED:
                    answer = None
                    with contextlib.suppress(Exception):  # another thread may change what it reads
                        answer = heartbeat.diagnosis()
                    pipe.send(ASKED, answer)
                else:
                    membership.on_message(kind, content)
            busy = membership.shut_broken()
            if busy and not membership.joins and blocked.found():
                pipe.send(ENDS, LOST)
                exit_now(FAILED)
    except (EOFError, OSError):
        if remove_if_abandoned(folder, wait_s=ABANDONED_S):  # the supervisor was killed and left its folder
            sweep(os.path.dirname(folder))
        os.killpg(0, signal.SIGKILL)


def exit_now(code: int) -> None:
    """End the process immediately, without waiting for threads of libraries or for peers.

    Args:
        code: exit status.
    """
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # its disk is full, or its reader has ended
            stream.flush()
    os._exit(code)
