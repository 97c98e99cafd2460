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
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import set_forkserver_preload
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fabricx.distributed import authentication, generations, heartbeat
from fabricx.errors import brief_traceback, is_full
from fabricx.launch import signals
from fabricx.launch.fork_server import fork_for_children
from fabricx.scratch import remove_if_abandoned, sweep

PRELOAD = ["torch.utils.data", "fabricx.launch.fork_server"]
BEAT_S = 0.5  # between two signs of life
LONG_S = 10.0  # without a further batch, after which signs of life say what the main thread is at
SHUT_S = 0.02  # between two looks for links of a broken group, while its worker is still busy with it
ABANDONED_S = 1.0  # until the system has let go of the lock of a process that was killed
FAILED = 1
ASKED = "diagnosis"  # the supervisor asks what a worker is at, and is told


@dataclass(frozen=True)
class Place:
    """Where a worker stands: plain data that reaches it before anything is unpickled.

    Attributes:
        store: path of the socket at which the supervisor hosts the store.
        key: of the run; only its processes have it.
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
    seat: int = 0  # a newcomer's rank, as far as that is known
    changes: bool = False  # may others come and go?
    serve: Callable[..., Any] | None = None  # what a server runs in the place of the job


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as the supervisor is told of it."""

    rank: int
    at: float
    kind: str
    traceback: str
    error: BaseException | None


def main(place: Place, control: Connection) -> None:
    """Run the function that the supervisor has left in the folder, and leave the result there."""
    os.setpgrp()  # whatever it starts can be ended with it
    set_forkserver_preload(["__main__", *PRELOAD])
    fork_for_children()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the supervisor decides
    if place.serve is not None:  # it ends when the workers have
        signals.ignore()
    report = _Report(control)
    report.send("beat", (0, False, ""))  # the supervisor notices silence from now on
    say = report.send if place.changes else None
    generations.enter(generations.Membership(place.rank, place.folder if say else "", say, lambda: _exit(0)))
    faulthandler.register(signal.SIGUSR2, (Path(place.folder) / f"stacks-{place.rank}").open("w"))
    threading.Thread(target=_listen, args=(control, report, place.folder), daemon=True).start()
    threading.Thread(target=report.beat, daemon=True).start()
    sys.path[:] = [*place.sys_path, *(entry for entry in sys.path if entry not in place.sys_path)]
    os.chdir(place.cwd)
    try:
        result = _run(place)
        report.send("result", _leave(result, Path(place.folder) / f"result-{place.rank}"))
    except BaseException as error:
        report.send("failure", _failure(place.rank, error))
        _exit(FAILED)
    _exit(0)


def _leave(result: Any, target: Path) -> str:
    """Write a result for the supervisor; returns where.

    Raises:
        OSError: there is no room; the message says what to do.
    """
    try:
        with target.open("wb") as file:  # not by way of a copy in memory: it has all weights
            pickle.dump(result, file)
    except OSError as error:
        if not is_full(error):
            raise
        target.unlink()
        text = f"{error.strerror}: what this rank returns doesn't fit into {target.parent}"
        raise OSError(
            error.errno, f"{text}; make room there, or let TMPDIR name another folder. Checkpoints have the weights"
        ) from None
    return str(target)


class _Report:
    """What the supervisor is told, by the main thread and by one that shows that this process is alive."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._control.send((kind, content))

    def beat(self) -> None:
        """Say again and again how far the main thread has come, and what it is at if that takes long."""
        reached, since = -1, time.monotonic()
        with contextlib.suppress(OSError):  # the supervisor has gone, and so will this process
            while True:
                if heartbeat.reached() != reached:
                    reached, since = heartbeat.reached(), time.monotonic()
                place = heartbeat.where() if time.monotonic() - since > LONG_S else ""
                self.send("beat", (reached, heartbeat.waits(), place))
                time.sleep(BEAT_S)


def _run(place: Place) -> Any:
    import torch

    from fabricx.distributed import world as worlds
    from fabricx.distributed.store import PrivateStore

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine; no name has to be looked up
    world = worlds.World(
        rank=place.rank,
        size=1 if place.newcomer else place.size,
        local_rank=place.seat if place.newcomer else place.rank,
        local_size=place.size,
        generation=place.generation,
        store=PrivateStore(place.store, place.key),
        secret=place.key,
        newcomer=place.newcomer,
    )
    if place.serve is not None:
        return place.serve(world, place.rank - place.size, place.folder)
    with authentication.open_private(Path(place.folder) / "job") as file:
        function, arguments = pickle.load(file)
    try:
        return function(world, *arguments)
    finally:
        if sys.exc_info()[0] is None:  # else: peers may never answer; the sockets close with the process
            worlds.leave()


def _failure(rank: int, error: BaseException) -> Failure:
    text = brief_traceback(error)
    try:
        pickle.loads(pickle.dumps(error))
        sent: BaseException | None = error
    except Exception:
        sent = None
    return Failure(rank, time.monotonic(), type(error).__name__, text, sent)


def _listen(control: Connection, report: _Report, folder: str) -> None:
    """Hear what the supervisor says; when its end of the pipe closes it has died: end all that was started here."""
    membership = generations.membership()
    busy = False
    try:
        while True:
            if control.poll(SHUT_S if busy else None):
                kind, content = control.recv()
                if kind == ASKED:
                    report.send(ASKED, heartbeat.diagnosis())
                else:
                    membership.heard(kind, content)
            busy = membership.shut_broken()
    except (EOFError, OSError):
        if remove_if_abandoned(folder, wait_s=ABANDONED_S):  # of a supervisor that was killed
            sweep(os.path.dirname(folder))
        os.killpg(0, signal.SIGKILL)


def _exit(code: int) -> None:
    """Leave at once: no thread of a library, and no peer, can hold up the end."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
