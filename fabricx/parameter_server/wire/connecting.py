"""Opens links between workers and servers.

A server publishes its address in the store. A worker of the same machine connects to the server's Unix socket
(`LinkListener`, `connect`) and sends the files of the shared vectors. A worker of another machine announces itself in
the store, and both ends build a gloo group of two (`meet_over_gloo`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta
from multiprocessing import reduction
from typing import Any, Final, final

import torch.distributed as dist

from fabricx.distributed.messages import authentication, peers
from fabricx.distributed.shared_memory.group import SOCKET_NAME
from fabricx.distributed.shared_memory.vectors import anonymous_file, map_vector
from fabricx.parameter_server.wire.link import GlooLink, Handshake, Link, SharedMemoryLink
from fabricx.scratch import private_folder

Store = dist.Store
NETWORK: Final = "network"  # in a server's address: workers of other machines can reach the server
READY: Final = "ready"  # store key with which a server announces that it connects to a worker now
MEET: Final = timedelta(seconds=20)  # timeout for connecting both ends of a gloo link when both are ready
_LISTENING: Final = threading.Lock()  # links begin to listen one after the other, so that their ports are identified


@final
class LinkListener:
    """Socket at which a server accepts workers of its machine; the server publishes its address in the store.

    Args:
        key: secret of the run; connections without proof of the key are closed.
        folder: folder for the socket; None for a temporary folder.

    Attributes:
        address: host name and path of the socket.
    """

    def __init__(self, key: bytes, folder: str | None = None) -> None:
        self._closed = False
        self._key = key
        self._folder = contextlib.ExitStack()
        private = self._folder.enter_context(private_folder(folder))
        self._listener = authentication.listen(private, SOCKET_NAME)
        self.address = f"{socket.gethostname()}:{os.path.join(private, SOCKET_NAME)}"

    def accept(self) -> Link:
        """Accept the next worker.

        Raises:
            OSError: the listener is closed.
            EOFError: the worker has died while it connected.
        """
        try:
            return self._accept()
        except (OSError, RuntimeError) as error:  # also of a connection that was reset
            if self._closed:
                raise
            raise EOFError("a worker has died while it connected") from error

    def _accept(self) -> Link:
        connection: Any = None
        while connection is None:
            connection = authentication.accept(self._listener, self._key)
            if self._closed:
                raise OSError("the server accepts no more workers")
        handshake: Handshake = connection.recv()
        inbox = map_vector(reduction.recv_handle(connection), handshake.dtype, handshake.to_server)
        outbox = inbox
        if handshake.to_worker is not None:
            outbox = map_vector(reduction.recv_handle(connection), handshake.dtype, handshake.to_worker)
        return SharedMemoryLink(connection, handshake, inbox, outbox)

    def close(self) -> None:
        """Close the socket; a pending `accept` raises an error."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._folder.close()


def connect(address: str, handshake: Handshake, key: bytes, previous: Link | None = None) -> Link | None:
    """Connect a worker to a server of the same machine.

    Args:
        address: address of the server's `LinkListener`.
        handshake: introduction of the worker.
        key: secret of the run.
        previous: a link that has ended, whose vectors are reused.

    Returns:
        The link; None if the server is on another machine.

    Raises:
        OSError: the server has ended.
        AuthenticationError: the listening process does not have the run's key.
    """
    host, _, path = address.partition(":")
    if host != socket.gethostname() or not os.path.exists(path):
        return None
    connection: Any = authentication.connect(path, key)
    connection.send(handshake)
    if isinstance(previous, SharedMemoryLink):
        files, inbox, outbox = [os.dup(file) for file in previous.files], previous.inbox, previous.outbox
    else:
        sizes = [handshake.to_server] if handshake.to_worker is None else [handshake.to_server, handshake.to_worker]
        files = [anonymous_file(size * handshake.dtype.itemsize) for size in sizes]
        vectors = [map_vector(os.dup(file), handshake.dtype, size) for file, size in zip(files, sizes, strict=True)]
        outbox, inbox = vectors[0], vectors[-1]
    link = SharedMemoryLink(connection, handshake, inbox, outbox, files)
    try:
        for file in files:
            reduction.send_handle(connection, file, 0)  # type: ignore[arg-type]
    except OSError:
        link.close()
        raise
    return link


def meet_over_gloo(
    store: dist.Store, name: str, handshake: Handshake, key: bytes, *, server: bool, previous: Link | None = None,
    timeout: timedelta = MEET,
) -> Link:  # fmt: skip
    """Connect an end of a link between machines; waits for the other end.

    Operations of the link have no timeout: the end of the peer process ends them.

    Args:
        store: store for the rendezvous.
        name: name of the link, equal at both ends.
        handshake: introduction of the worker.
        key: secret of the run.
        server: this end is the server's.
        previous: a link that has ended, whose vectors are reused.
        timeout: timeout of the rendezvous.

    Raises:
        RuntimeError: the other end did not connect within the timeout.
        AuthenticationError: on both ends: a foreign program has connected in place of an end.
    """
    rank, meeting = 1 if server else 0, dist.PrefixStore(name, store)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    with _LISTENING:
        others = peers.ports()
        options._devices = _devices()
        ports = peers.ports() - others
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    group = dist.ProcessGroupGloo(meeting, rank, 2, options)  # type: ignore[attr-defined]
    peers.confirm(meeting, rank, 2, ports, timeout, lambda: None)
    return GlooLink(group, handshake, key, name, server=server, previous=previous)


def _devices() -> list[Any]:
    """Return gloo's default devices, without lazy connections: the connections are checked right afterwards."""
    gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
    return [gloo.create_default_device(lazy_init=False)]
