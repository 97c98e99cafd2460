"""Fork servers: the supervisor's, which starts workers, and a worker's, which starts loader processes.

A fork server imports this module when it starts (`multiprocessing.set_forkserver_preload`).
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from typing import Any, Final

from fabricx.launch import signals

AUTHENTICATED: Final = (3, 14)  # from this version of Python on, fork servers ask for a key: another protocol


def fork_for_children() -> None:
    """Let the fork server of this process be a fork of the one that this process was started from.

    multiprocessing would start a new interpreter, and each process that loads data would import there what the
    supervisor's fork server has imported already: seconds until the first batch. The new server is in this process's
    group, so that it ends with it. Without a fork server, or from Python 3.14 on, nothing changes.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server.get_inherited_fds() is not None and sys.version_info < AUTHENTICATED:
        server.ensure_running = _Forked(server).ensure_running


class _Forked:
    """The fork server of a process whose own is a fork of the one that started it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._origin = (server._forkserver_address, server._forkserver_alive_fd)
        self._lock = threading.RLock()
        self._starting = False
        self._process: BaseProcess | None = None

    def ensure_running(self) -> None:
        """Start the server unless it runs: the method of this name of multiprocessing's `ForkServer`."""
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
        alive_here, alive_there = socket.socketpair()  # the server ends when no process has this end any more
        with socket.socket(socket.AF_UNIX) as listener, alive_there:
            address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
            listener.bind(address)
            os.chmod(address, 0o600)
            listener.listen()
            arguments = (listener, alive_there, os.getpgrp(), dict(os.environ), _cores())
            process = get_context("forkserver").Process(target=_serve, args=arguments, name="fork server", daemon=True)
            process.start()
        self._process = process
        server._forkserver_address, server._forkserver_alive_fd = address, alive_here.detach()


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _serve(
    listener: socket.socket, alive: socket.socket, group: int, environment: dict[str, str], cores: set[int] | None
) -> None:
    """Be a fork server with what a new interpreter would have from the process that starts it."""
    os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(environment)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    signals.ignore()
    forkserver.main(listener.detach(), alive.detach(), [])


def prepare() -> None:
    """Make this process fit to fork, once all is imported.

    A scheduler that ends a job signals each of its processes. A fork server that ended with them would take along what
    becomes of the workers; it ends with the process that started it. Its forks are ended by the signals as ever.
    """
    signals.ignore()
    os.register_at_fork(after_in_child=signals.hear)
    gc.collect()
    gc.freeze()  # the collector of a fork would touch, and so copy, every page


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    prepare()
