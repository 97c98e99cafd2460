"""Links between a worker and a server: shared memory on the same machine, gloo between machines.
A link carries small messages and, with some of them, a vector in each direction. An operation on a link fails as soon
as the peer process has died. The shared memory has no name, so it never outlives the two processes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx import by_value
from fabricx.distributed import authentication, peers
from fabricx.scratch import private_folder

Store = dist.Store
LOST: Final = (EOFError, OSError, RuntimeError)  # errors of a link whose peer has died
PARTITION: Final = 1 << 22  # maximum bytes of a gloo operation
DOOR: Final = "door"  # file name of the Unix socket
NETWORK: Final = "network"  # in a server's address: workers of other machines can reach the server
READY: Final = "ready"  # store key with which a server announces that it connects to a worker now
CLOSE: Final = timedelta(seconds=5)  # timeout of the last messages
MEET: Final = timedelta(seconds=20)  # timeout for connecting both ends of a gloo link when both are ready
UNLIMITED: Final = timedelta(days=365)  # timeout of a receive, which the end of the peer process ends
_LISTENING: Final = threading.Lock()  # links begin to listen one after the other, so that their ports are identified


@dataclass(slots=True)
class Handshake:
    """Introduction of a worker to a server.

    Attributes:
        worker: number of the worker.
        dtype: data type of the vectors.
        forth: elements of the vector from the worker to the server.
        back: elements of the vector from the server; None if it replaces the worker's vector in the same memory.
        generation: generation of the workers in lockstep; None for workers at their own pace.
        resumes: this worker had an earlier link to the server, with the same vectors and message numbers.
    """

    worker: int
    dtype: torch.dtype
    forth: int
    back: int | None
    generation: int | None = 0
    resumes: bool = False

    def dumps(self, key: bytes, store_key: str) -> bytes:
        """Serialise and sign this.

        Args:
            key: secret of the run.
            store_key: key of the store at which it will be written.
        """
        text = {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
        return authentication.sign(key, ["hello", store_key], json.dumps(text).encode())

    @staticmethod
    def loads(key: bytes, store_key: str, signed: bytes) -> Handshake:
        """Verify and deserialise a result of `dumps`.

        Args:
            key: secret of the run.
            store_key: key of the store.
            signed: content of the store.

        Raises:
            AuthenticationError: it was not written by a process with the run's key.
        """
        text = json.loads(authentication.verify(key, ["hello", store_key], signed))
        return Handshake(**{**text, "dtype": getattr(torch, text["dtype"])})


class Link(ABC):
    """A worker's or a server's end of a link.

    Args:
        hello, inbox, outbox: see Attributes.

    Attributes:
        hello: introduction of the worker.
        inbox: vector into which parts were received with the newest message.
        outbox: vector from which parts are sent.
        sent, received: bytes of vectors.
        arrived: called with the end position of each part that is received before its message.
    """

    def __init__(self, hello: Handshake, inbox: Tensor, outbox: Tensor) -> None:
        self.hello = hello
        self.inbox, self.outbox = inbox, outbox
        self.sent = self.received = 0
        self.arrived: Callable[[int], None] | None = None

    @abstractmethod
    def post(self, start: int, stop: int) -> None:
        """Start to send the bytes [start, stop) of the outbox; returns at once. They precede the next message.

        Args:
            start, stop: positions in bytes.
        """

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message after all posted parts.

        Args:
            message: can be pickled.
        """

    @abstractmethod
    def recv(self) -> Any:
        """Wait for the next message; the parts that precede it are then in the inbox."""

    @abstractmethod
    def close(self) -> None:
        """Close the link, which the peer detects."""

    def peer_lost(self) -> bool:
        """Return whether the peer is known to have died, without waiting."""
        return False

    def pin(self) -> Callable[[], None]:
        """Register the vectors with CUDA for asynchronous copies; returns a function that unregisters them."""
        cuda: Any = torch.cuda.cudart()
        vectors = {vector.data_ptr(): vector.nbytes for vector in (self.inbox, self.outbox) if vector.nbytes}
        for address, size in vectors.items():
            cuda.cudaHostRegister(address, size, 0)

        def unpin() -> None:
            for address in vectors:
                cuda.cudaHostUnregister(address)

        return unpin


@final
class SharedMemory(Link):
    """Link whose vectors are in memory that both processes map, with a Unix socket for messages.

    Args:
        connection: connection of the socket.
        hello: introduction of the worker.
        inbox, outbox: vectors in shared memory.
        files: file descriptors of the vectors, closed with the link; until then, another link can reuse the memory.
    """

    def __init__(
        self, connection: Connection, hello: Handshake, inbox: Tensor, outbox: Tensor, files: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(hello, inbox, outbox)
        self._connection = connection
        self._posted = 0
        self.files = files

    def post(self, start: int, stop: int) -> None:
        self._posted += stop - start

    def send(self, message: Any) -> None:
        posted, self._posted = self._posted, 0
        # Not multiprocessing's pickler, which would send tensors through shared files of their own.
        self._connection.send_bytes(by_value.dumps((message, posted)))
        self.sent += posted

    def recv(self) -> Any:
        message, posted = pickle.loads(self._connection.recv_bytes())
        self.received += posted
        return message

    def close(self) -> None:
        self._connection.close()
        files, self.files = self.files, ()
        for file in files:
            os.close(file)

    def peer_lost(self) -> bool:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as peer:
            try:
                return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True


@final
class Gloo(Link):
    """Link through a gloo process group of two, which is independent of all other groups.

    A header of three integers precedes each part and each message: (bytes of a message, 0, 0) or (0, start, stop) of a
    part. Gloo sends in its own threads when the peer receives, in the order of the operations.

    Args:
        group: process group with the worker as rank 0 and the server as rank 1.
        hello: introduction of the worker.
        key: secret of the run.
        name: name of the link, unique in the run.
        server: this end is the server's.
        before: a link that has ended, whose vectors are reused.
    """

    def __init__(
        self, group: Any, hello: Handshake, key: bytes, name: str, *, server: bool, before: Link | None = None
    ) -> None:  # fmt: skip
        if before is None:
            forth = torch.zeros(hello.forth, dtype=hello.dtype)
            back = torch.zeros(hello.forth if hello.back is None else hello.back, dtype=hello.dtype)
            super().__init__(hello, forth if server else back, back if server else forth)
        else:
            super().__init__(hello, before.inbox, before.outbox)
        self._group, self._peer = group, 0 if server else 1
        self._key, self._name = key, name
        self._messages = [0, 0]  # numbers of sent and received messages, signed to prevent replays
        self._pending: list[tuple[Any, Tensor]] = []  # sends with their tensors

    def post(self, start: int, stop: int) -> None:
        outbox = self.outbox.view(torch.uint8)
        for low in range(start, stop, PARTITION):
            high = min(low + PARTITION, stop)
            self._begin_to_send(torch.tensor([0, low, high]))
            self._begin_to_send(outbox[low:high])
        self.sent += stop - start

    def send(self, message: Any) -> None:
        context = [self._name, 1 - self._peer, self._messages[0]]
        data = torch.frombuffer(bytearray(authentication.dumps(self._key, context, message)), dtype=torch.uint8)
        self._messages[0] += 1
        self._begin_to_send(torch.tensor([len(data), 0, 0]))
        for low in range(0, len(data), PARTITION):
            self._begin_to_send(data[low : low + PARTITION])

    def _begin_to_send(self, tensor: Tensor) -> None:
        self._pending.append((self._group.send([tensor], self._peer, 0), tensor))

    def recv(self) -> Any:
        inbox = self.inbox.view(torch.uint8)
        header = torch.zeros(3, dtype=torch.int64)
        while True:
            self._receive(header)
            pending, self._pending = self._pending, []
            for work, _ in pending:  # the peer has answered, so it has received all of them
                work.wait(UNLIMITED)
            length, start, stop = header.tolist()
            if length:
                data = torch.empty(length, dtype=torch.uint8)
                for low in range(0, length, PARTITION):
                    self._receive(data[low : low + PARTITION])
                context = [self._name, self._peer, self._messages[1]]
                self._messages[1] += 1
                return authentication.loads(self._key, context, data.numpy().tobytes())
            self._receive(inbox[start:stop])
            self.received += stop - start
            if self.arrived is not None:
                self.arrived(stop)

    def _receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait(UNLIMITED)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the peer may have died
            for work, _ in self._pending:
                work.wait(CLOSE)
        del self._group


# -- connecting -------------------------------------------------------------------------------------------------------


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
        self._listener = authentication.listen(private, DOOR)
        self.address = f"{socket.gethostname()}:{os.path.join(private, DOOR)}"

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
        hello: Handshake = connection.recv()
        inbox = map_vector(reduction.recv_handle(connection), hello.dtype, hello.forth)
        outbox = inbox
        if hello.back is not None:
            outbox = map_vector(reduction.recv_handle(connection), hello.dtype, hello.back)
        return SharedMemory(connection, hello, inbox, outbox)

    def close(self) -> None:
        """Close the socket; a pending `accept` raises an error."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._folder.close()


def connect(address: str, hello: Handshake, key: bytes, before: Link | None = None) -> Link | None:
    """Connect a worker to a server of the same machine.

    Args:
        address: address of the server's `LinkListener`.
        hello: introduction of the worker.
        key: secret of the run.
        before: a link that has ended, whose vectors are reused.

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
    connection.send(hello)
    if isinstance(before, SharedMemory):
        files, inbox, outbox = [os.dup(file) for file in before.files], before.inbox, before.outbox
    else:
        sizes = [hello.forth] if hello.back is None else [hello.forth, hello.back]
        files = [anonymous_file(size * hello.dtype.itemsize) for size in sizes]
        vectors = [map_vector(os.dup(file), hello.dtype, size) for file, size in zip(files, sizes, strict=True)]
        outbox, inbox = vectors[0], vectors[-1]
    link = SharedMemory(connection, hello, inbox, outbox, files)
    try:
        for file in files:
            reduction.send_handle(connection, file, 0)  # type: ignore[arg-type]
    except OSError:
        link.close()
        raise
    return link


def anonymous_file(size: int) -> int:
    """Create a file in memory without a name, which is deleted when the last process closes it.

    Args:
        size: size in bytes.

    Returns:
        File descriptor.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fabricx", os.MFD_CLOEXEC)
    else:
        file, path = tempfile.mkstemp(prefix="fabricx-")
        os.unlink(path)
    os.ftruncate(file, max(1, size))
    return file


def map_vector(file: int, dtype: torch.dtype, elements: int) -> Tensor:
    """Map a file as a vector and close the file; the memory lives as long as the vector.

    Args:
        file: file descriptor.
        dtype: data type of the vector.
        elements: length of the vector.
    """
    memory = mmap.mmap(file, max(1, elements * dtype.itemsize))
    os.close(file)
    return torch.frombuffer(memory, dtype=dtype, count=elements) if elements else torch.empty(0, dtype=dtype)


def meet_over_gloo(
    store: dist.Store, name: str, hello: Handshake, key: bytes, *, server: bool, before: Link | None = None,
    timeout: timedelta = MEET,
) -> Link:  # fmt: skip
    """Connect an end of a link between machines; waits for the other end.

    Operations of the link have no timeout: the end of the peer process ends them.

    Args:
        store: store for the rendezvous.
        name: name of the link, equal at both ends.
        hello: introduction of the worker.
        key: secret of the run.
        server: this end is the server's.
        before: a link that has ended, whose vectors are reused.
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
    return Gloo(group, hello, key, name, server=server, before=before)


def _devices() -> list[Any]:
    """Return gloo's default devices, without lazy connections: the connections are checked right afterwards."""
    gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
    return [gloo.create_default_device(lazy_init=False)]
