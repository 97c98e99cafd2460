"""Connections of process groups, and their end after a worker has died or left."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any, final


@final
class GroupConnections:
    """Sockets that process groups open: all sockets that exist after a group was built and did not exist before.

    gloo loses an operation if a write fails before its thread has read the end of the connection: the operation then
    waits for its timeout of 30 minutes. Therefore connections end so that no write fails. Only their receiving
    direction is shut down, which ends the pending operations of this process with an error, and duplicate descriptors
    keep them open until all workers have left the group: the system would answer data of a peer by a reset otherwise.
    Peers do not read the end of a connection, but receive the supervisor's notice.

    Args:
        store: connections to it belong to no group.
        silent: the groups use transports other than sockets (NCCL) and have to be aborted as well.
    """

    def __init__(self, store: Any, silent: bool) -> None:
        self._store = store
        self.silent = silent
        self._aborted: set[int] = set()
        self._own: set[str] = set()
        self._before: set[str] | None = None
        self._held: dict[str, socket.socket] = {}  # duplicates of connections that have ended, by inode name
        self._lock = threading.Lock()

    def opening(self) -> None:
        """Assign sockets that are opened from now on to the group."""
        self._before = set(_open_sockets())

    def opened(self) -> None:
        """Stop to assign new sockets to the group."""
        if self._before is not None:
            self._own |= set(_open_sockets()) - self._before
        self._before = None

    @property
    def opens(self) -> bool:
        """Return whether a group is being built."""
        return self._before is not None

    def interrupt(self) -> None:
        """End all pending operations of this process with an error."""
        with self._lock:
            if self.silent:
                _abort(self._aborted)
            for name, numbers in _open_sockets().items():
                if name not in self._held and self._belongs(name):
                    self._hold(name, numbers[0])
            for link in self._held.values():
                with contextlib.suppress(OSError):  # not connected any more
                    link.shutdown(socket.SHUT_RDWR if self.silent else socket.SHUT_RD)

    def release(self) -> None:
        """Close the duplicate descriptors."""
        with self._lock:
            for link in self._held.values():
                link.close()
            self._held.clear()

    def _belongs(self, name: str) -> bool:
        return name in self._own or (self._before is not None and name not in self._before)

    def _hold(self, name: str, number: int) -> None:
        """Duplicate a connection; listening sockets and connections to the store are left out."""
        with contextlib.suppress(OSError):  # closed meanwhile
            link = socket.socket(fileno=os.dup(number))
            try:
                peer, internet = link.getpeername(), link.family in (socket.AF_INET, socket.AF_INET6)
                # Read on each call: the store's address exists only after its first connection.
                store = getattr(self._store, "port" if internet else "peer", None)
                # The number belongs to a later socket if the name differs.
                if _name(link.fileno()) == name and (peer[1] if internet else peer) != store:
                    self._held[name] = link
            finally:
                if name not in self._held:
                    link.close()


def _name(number: int) -> str:
    return os.readlink(f"/proc/self/fd/{number}")


def _open_sockets() -> dict[str, list[int]]:
    """Return file descriptors of this process's sockets by inode name, unique on the machine; empty except on Linux."""
    sockets: dict[str, list[int]] = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if (name := _name(int(number))).startswith("socket:"):
                sockets.setdefault(name, []).append(int(number))
    return sockets


def _abort(aborted: set[int]) -> None:
    """Abort this process's groups that were not aborted before; pending collectives then end with undefined data.

    All groups are aborted in one NCCL group call: separate aborts would wait for operations of the other groups
    (pytorch/pytorch#119797).
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    names = dict(c10d._world.pg_names)
    groups = sorted((group for group in names if id(group) not in aborted), key=lambda g: names[g], reverse=True)
    aborted.update(map(id, groups))
    backends: list[Any] = []
    with contextlib.suppress(RuntimeError):  # a group has no NCCL backend, or is being built
        backends = [group._get_backend(torch.device("cuda")) for group in groups[:1] if c10d.is_nccl_available()]
    for nccl in backends:
        nccl._group_start()
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    for nccl in backends:
        nccl._group_end()
