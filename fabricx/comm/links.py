"""Ways between one worker and one server: shared memory on one machine, gloo between machines.

A link carries small messages and, beside some of them, one vector each way. Its end says at once when the other side
has died. Shared memory has no name: nothing of it can outlive the two processes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

Store = dist.Store
LOST: Final = (EOFError, OSError, RuntimeError)  # what a link raises when the other side is gone
PARTITION: Final = 1 << 22  # bytes that gloo is given at a time


@dataclass(slots=True)
class Hello:
    """Who a worker is, how large its part of the parameters is, and whether all are given the same, in one memory."""

    worker: int
    size: int
    dtype: torch.dtype
    same: bool = False


class Link(ABC):
    """One end of a way.

    Attributes:
        hello: what the worker has said of itself.
        inbox: the vector that came with the newest message that had one.
        outbox: what goes with the next one that has one.
        sent, received: bytes of vectors.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.inbox = torch.empty(0)
        self.outbox = torch.empty(0)
        self.sent = self.received = 0

    @abstractmethod
    def send(self, message: Any, *, vector: int = 0) -> None:
        """Send a message, with the first `vector` bytes of the outbox."""

    @abstractmethod
    def recv(self) -> Any:
        """Wait for the next message; its vector is in the inbox then."""

    @abstractmethod
    def close(self) -> None:
        """Let the other side know that nothing will come any more."""

    def gone(self) -> bool:
        """Return whether the other side is known to have died, without waiting for a message."""
        return False


@final
class SharedMemory(Link):
    """Vectors lie in memory that both processes see; a socket rings."""

    def __init__(self, connection: Connection, hello: Hello, inbox: Tensor, outbox: Tensor) -> None:
        super().__init__(hello)
        self._connection = connection
        self.inbox, self.outbox = inbox, outbox

    def send(self, message: Any, *, vector: int = 0) -> None:
        # Plain pickles: those of multiprocessing would hand tensors over by files of their own.
        self._connection.send_bytes(pickle.dumps((message, vector)))
        self.sent += vector

    def recv(self) -> Any:
        message, vector = pickle.loads(self._connection.recv_bytes())
        self.received += vector
        return message

    def close(self) -> None:
        self._connection.close()

    def gone(self) -> bool:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as peer:
            try:
                return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True


@final
class Gloo(Link):
    """A process group of two, which has a store for meeting and nothing else in common with any other group."""

    def __init__(self, group: Any, hello: Hello, *, server: bool) -> None:
        super().__init__(hello)
        self._group, self._peer = group, 0 if server else 1
        self.inbox, self.outbox = torch.zeros(hello.size, dtype=hello.dtype), torch.zeros(hello.size, dtype=hello.dtype)

    def send(self, message: Any, *, vector: int = 0) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps((message, vector))), dtype=torch.uint8)
        self._group.send([torch.tensor([len(data)])], self._peer, 0).wait()
        for part in (*_partitions(data), *_partitions(self.outbox.view(torch.uint8)[:vector])):
            self._group.send([part], self._peer, 0).wait()
        self.sent += vector

    def recv(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], self._peer, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        for part in _partitions(data):
            self._group.recv([part], self._peer, 0).wait()
        message, vector = pickle.loads(data.numpy().tobytes())
        for part in _partitions(self.inbox.view(torch.uint8)[:vector]):
            self._group.recv([part], self._peer, 0).wait()
        self.received += vector
        return message

    def close(self) -> None:
        del self._group


def _partitions(tensor: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(tensor), PARTITION):
        yield tensor[start : start + PARTITION]


# -- meeting ----------------------------------------------------------------------------------------------------------


@final
class Entrance:
    """Where a server lets workers of its machine in; its address is for them to read from the store.

    Args:
        folder: to make the door in, if there is one that somebody cleans up.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._closed = False
        self._same: tuple[int, Tensor] | None = None  # what all workers see that are given the same
        self._folder = tempfile.TemporaryDirectory(prefix="fabricx-server-", dir=folder)
        self._listener = Listener(os.path.join(self._folder.name, "door"), "AF_UNIX", backlog=64)
        self.address = f"{socket.gethostname()}:{self._listener.address}"

    def accept(self) -> Link:
        """Wait for the next worker.

        Raises:
            OSError: the entrance is closed.
        """
        connection: Any = self._listener.accept()
        if self._closed:
            raise OSError("nobody is let in any more")
        hello: Hello = connection.recv()
        inbox = _mapped(reduction.recv_handle(connection), hello)
        if not hello.same:
            return SharedMemory(connection, hello, inbox, _mapped(reduction.recv_handle(connection), hello))
        if self._same is None:
            file = _nameless(hello)
            self._same = file, _mapped(os.dup(file), hello)
        reduction.send_handle(connection, self._same[0], 0)
        return SharedMemory(connection, hello, inbox, self._same[1])

    def close(self) -> None:
        """Let nobody in any more; whoever waits at `accept` waits no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            Client(self._listener.address, "AF_UNIX").close()
            self._listener.close()
        if self._same is not None:
            os.close(self._same[0])
            self._same = None
        self._folder.cleanup()


def connect(address: str, hello: Hello) -> Link | None:
    """Return this worker's link to a server of its own machine; None if the server is on another one."""
    host, _, path = address.partition(":")
    if host != socket.gethostname() or not os.path.exists(path):
        return None
    connection: Any = Client(path, "AF_UNIX")
    connection.send(hello)
    boxes = [_nameless(hello) for _ in range(1 if hello.same else 2)]
    for file in boxes:
        reduction.send_handle(connection, file, 0)
    if hello.same:
        boxes.append(reduction.recv_handle(connection))
    outbox, inbox = (_mapped(file, hello) for file in boxes)
    return SharedMemory(connection, hello, inbox, outbox)


def _mapped(file: int, hello: Hello) -> Tensor:
    """Return a vector in a file, which is closed; the memory stays as long as the vector."""
    memory = mmap.mmap(file, max(1, hello.size * hello.dtype.itemsize))
    os.close(file)
    return torch.frombuffer(memory, dtype=hello.dtype, count=hello.size) if hello.size else torch.empty(0)


def _nameless(hello: Hello) -> int:
    """Return a file in memory that is gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fabricx", os.MFD_CLOEXEC)
    else:
        file, path = tempfile.mkstemp(prefix="fabricx-")
        os.unlink(path)
    os.ftruncate(file, max(1, hello.size * hello.dtype.itemsize))
    return file


def meet_over_gloo(store: dist.Store, name: str, hello: Hello, *, server: bool, timeout: timedelta) -> Link:
    """Return one end of a link between machines; waits for the other end, which gives the same name."""
    place = 1 if server else 0
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, 2, timeout)  # type: ignore[attr-defined]
    return Gloo(group, hello, server=server)
