"""Fork servers: the supervisor's, which starts workers, and a worker's, which starts loader processes.

A fork server imports this module when it starts (`multiprocessing.set_forkserver_preload`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver, get_context, resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any, Final

from fabricx.launch import signals
from fabricx.launch.module_files import ModuleFiles
from fabricx.launch.preloaded import serves
from fabricx.launch.process_settings import ProcessSettings

WAKE_S: Final = 0.5  # seconds between two SIGCONT signals
AUTHENTICATED: Final = (3, 14)  # from this version of Python on, the protocol of fork servers requires a key


def without_script() -> Callable[[], None]:
    """Start further processes of multiprocessing without an import of the script; returns a function that undoes it.

    A script that starts workers at its top level would start workers in each of them. Objects of the script are sent
    by value instead (`fabricx/by_value.py`).
    """
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = {key: value for key, value in original(name).items() if not key.startswith("init_main_from")}
        return data | {"module_files": [finder for finder in sys.meta_path if isinstance(finder, ModuleFiles)]}

    def undo() -> None:
        spawn.get_preparation_data = original

    spawn.get_preparation_data = get_preparation_data
    return undo


@contextlib.contextmanager
def starting_without_script() -> Iterator[None]:
    """Return a context in which processes are started `without_script`."""
    undo = without_script()
    try:
        yield
    finally:
        undo()


def fork_for_children() -> None:
    """Create this process's fork server by forking the fork server that this process was forked from.

    multiprocessing would start a new interpreter instead, and data loader processes would import again all modules
    that the supervisor's fork server has loaded: seconds until the first batch. The new server joins this process's
    group, so that both are killed together. Without a fork server, or from Python 3.14 on, nothing changes.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server.get_inherited_fds() is not None and sys.version_info < AUTHENTICATED:
        server.ensure_running = _ForkedServer(server).ensure_running


class _ForkedServer:
    """Fork server of a worker, forked from the supervisor's fork server."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._origin = (server._forkserver_address, server._forkserver_alive_fd)
        self._lock = threading.RLock()
        self._starting = False
        self._process: BaseProcess | None = None

    def ensure_running(self) -> None:
        """Start the server unless it runs; replaces the method of the same name of multiprocessing's `ForkServer`."""
        with self._lock:
            if self._starting or (self._process is not None and self._process.is_alive()):
                return
            self._starting = True
            try:
                self._start()
            finally:
                self._starting = False

    def _start(self) -> None:
        server = self._server
        if self._process is not None:  # it was killed
            os.close(server._forkserver_alive_fd)
            self._process = None
        server._forkserver_address, server._forkserver_alive_fd = self._origin
        alive_here, alive_there = socket.socketpair()  # the server ends when all copies of this end are closed
        with socket.socket(socket.AF_UNIX) as listener, alive_there:
            address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
            listener.bind(address)
            os.chmod(address, 0o600)
            listener.listen()
            arguments = (listener, alive_there, os.getpgrp(), ProcessSettings.of_this_process(), _cores())
            process = get_context("forkserver").Process(target=_serve, args=arguments, name="fork server", daemon=True)
            process.start()
        self._process = process
        server._forkserver_address, server._forkserver_alive_fd = address, alive_here.detach()


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _serve(
    listener: socket.socket, alive: socket.socket, group: int, settings: ProcessSettings, cores: set[int] | None
) -> None:
    """Run a fork server with the process group, settings and processor affinity of the process that starts it."""
    os.setpgid(0, group)
    settings.apply()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    signals.ignore()
    forkserver.main(listener.detach(), alive.detach(), [])


@contextlib.contextmanager
def keep_running() -> Iterator[None]:
    """Continue this process's fork server and resource tracker whenever they are stopped, by periodic SIGCONT signals.

    The fork server starts processes and reports their ends; while it is stopped, callers wait for both without end. So
    do callers of a stopped tracker once its pipe is full. Running processes ignore SIGCONT.
    """
    closed = threading.Event()

    def wake() -> None:
        while not closed.wait(WAKE_S):
            server: Any = forkserver._forkserver  # type: ignore[attr-defined]
            tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
            for number in (server._forkserver_pid, tracker._pid):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGCONT)

    thread = threading.Thread(target=wake, name="fabricx-fork-server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def prepare() -> None:
    """Prepare this fork server for forking, after all imports.

    A scheduler that ends a job signals every process. The fork server ignores these signals, because the exit statuses
    of the workers would be lost with it; it ends with the process that started it. Its forks handle the signals.
    """
    signals.ignore()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `preloaded` has ignored it; multiprocessing does next
    os.register_at_fork(after_in_child=signals.restore)
    gc.collect()
    gc.freeze()  # garbage collection in a fork would write to, and thus copy, every page


if serves():
    prepare()
