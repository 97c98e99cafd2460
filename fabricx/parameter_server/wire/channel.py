"""Links between one worker and one server: shared memory on one machine, gloo between machines.

A link carries small messages and, beside some of them, one vector each way. Its end says at once when the other side
has died. Shared memory has no name: nothing of it can outlive the two processes.
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

from fabricx.distributed import authentication, peers
from fabricx.scratch import private_folder

Store = dist.Store
LOST: Final = (EOFError, OSError, RuntimeError)  # what a link raises when the other side is gone
PARTITION: Final = 1 << 22  # bytes that gloo is given at a time
DOOR: Final = "door"  # name of the socket
NETWORK: Final = "network"  # what a server says of itself that other machines may reach
READY: Final = "ready"  # key by which a server says that it meets a worker now
CLOSE: Final = timedelta(seconds=5)  # how long the last words may take
MEET: Final = timedelta(seconds=20)  # from when both ends of a gloo link are ready until they are connected
UNLIMITED: Final = timedelta(days=365)  # time-out of a receive: the end of the peer process ends it
_LISTENING: Final = threading.Lock()  # one link at a time begins to listen, so that its ports are known


@dataclass(slots=True)
class Handshake:
    """Who a worker is, and which vectors travel.

    Attributes:
        worker: its number.
        dtype: of the elements.
        forth: elements of the vector that the worker sends.
        back: of the one that it is sent; None if that comes in the place of its own.
        generation: of the workers that go together, of which it is one; None where each goes by itself.
        resumes: this worker had another link to the server before, with the same vectors and numbers of messages.
    """

    worker: int
    dtype: torch.dtype
    forth: int
    back: int | None
    generation: int | None = 0
    resumes: bool = False

    def dumps(self, key: bytes, place: str) -> bytes:
        """Return this as signed plain text, for the key `place` of a store."""
        text = {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
        return authentication.sign(key, ["hello", place], json.dumps(text).encode())

    @staticmethod
    def loads(key: bytes, place: str, signed: bytes) -> Handshake:
        """Return what `dumps` has written to a place.

        Raises:
            AuthenticationError: a process without the run's key has written it.
        """
        text = json.loads(authentication.verify(key, ["hello", place], signed))
        return Handshake(**{**text, "dtype": getattr(torch, text["dtype"])})


class Link(ABC):
    """One end of a way.

    Attributes:
        hello: what the worker has said of itself.
        inbox: the vector of which parts came with the newest message.
        outbox: the vector of which parts may go.
        sent, received: bytes of vectors.
        arrived: called with the last byte of each part that has come, if that comes before its message.
    """

    def __init__(self, hello: Handshake, inbox: Tensor, outbox: Tensor) -> None:
        self.hello = hello
        self.inbox, self.outbox = inbox, outbox
        self.sent = self.received = 0
        self.arrived: Callable[[int], None] | None = None

    @abstractmethod
    def post(self, start: int, stop: int) -> None:
        """Let the bytes [start, stop) of the outbox go. Waits for nothing; they are complete when a message follows."""

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message after all parts that were posted."""

    @abstractmethod
    def recv(self) -> Any:
        """Wait for the next message; what was posted before it is in the inbox then."""

    @abstractmethod
    def close(self) -> None:
        """Let the other side know that nothing will come any more."""

    def gone(self) -> bool:
        """Return whether the other side is known to have died, without waiting for a message."""
        return False

    def pin(self) -> Callable[[], None]:
        """Let CUDA copy between the vectors and a device while others compute; returns what ends that."""
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
    """Vectors lie in memory that both processes see; a socket rings.

    Args:
        files: of the vectors, which the link closes; while they are open, another link can take over the memory.
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
        # Plain pickles: those of multiprocessing would hand tensors over by files of their own.
        self._connection.send_bytes(pickle.dumps((message, posted)))
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
    """A process group of two, which has a store for meeting and nothing else in common with any other group.

    Each part and each message has three numbers before it: the bytes of a message, or none and where a part belongs.
    Gloo sends when the other side receives, in threads of its own, and what was sent first comes first.
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
        self._messages = [0, 0]  # sent and received: part of what is signed, so that none can be replayed
        self._going: list[tuple[Any, Tensor]] = []  # with its memory

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
        self._going.append((self._group.send([tensor], self._peer, 0), tensor))

    def recv(self) -> Any:
        inbox = self.inbox.view(torch.uint8)
        header = torch.zeros(3, dtype=torch.int64)
        while True:
            self._receive(header)
            going, self._going = self._going, []
            for work, _ in going:  # the other side has answered: it has all of it
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
        with contextlib.suppress(RuntimeError):  # it may have died
            for work, _ in self._going:
                work.wait(CLOSE)
        del self._group


# -- meeting ----------------------------------------------------------------------------------------------------------


@final
class LinkListener:
    """Where a server lets workers of its machine in; its address is for them to read from the store.

    Args:
        key: of the run; connections that don't prove to have it are closed.
        folder: to make the door in, if there is one that somebody cleans up.
    """

    def __init__(self, key: bytes, folder: str | None = None) -> None:
        self._closed = False
        self._key = key
        self._folder = contextlib.ExitStack()
        own = self._folder.enter_context(private_folder(folder))
        self._listener = authentication.listen(own, DOOR)
        self.address = f"{socket.gethostname()}:{os.path.join(own, DOOR)}"

    def accept(self) -> Link:
        """Wait for the next worker.

        Raises:
            OSError: the entrance is closed.
        """
        connection: Any = None
        while connection is None:
            connection = authentication.accept(self._listener, self._key)
            if self._closed:
                raise OSError("the server accepts no more workers")
        hello: Handshake = connection.recv()
        inbox = mapped(reduction.recv_handle(connection), hello.dtype, hello.forth)
        outbox = inbox
        if hello.back is not None:
            outbox = mapped(reduction.recv_handle(connection), hello.dtype, hello.back)
        return SharedMemory(connection, hello, inbox, outbox)

    def close(self) -> None:
        """Let nobody in any more; whoever waits at `accept` waits no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._folder.close()


def connect(address: str, hello: Handshake, key: bytes, before: Link | None = None) -> Link | None:
    """Return this worker's link to a server of its own machine.

    Args:
        address: of the server.
        hello: what the server is told first.
        key: of the run.
        before: a link that has ended, whose vectors the new one takes over.

    Returns:
        the link; None if the server is on another machine.

    Raises:
        OSError: the server isn't there any more.
        AuthenticationError: what listens there doesn't have the run's key.
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
        files = [nameless(size * hello.dtype.itemsize) for size in sizes]
        vectors = [mapped(os.dup(file), hello.dtype, size) for file, size in zip(files, sizes, strict=True)]
        outbox, inbox = vectors[0], vectors[-1]
    link = SharedMemory(connection, hello, inbox, outbox, files)
    try:
        for file in files:
            reduction.send_handle(connection, file, 0)  # type: ignore[arg-type]
    except OSError:
        link.close()
        raise
    return link


def nameless(size: int) -> int:
    """Return a file in memory, of so many bytes; it has no name, and is gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fabricx", os.MFD_CLOEXEC)
    else:
        file, path = tempfile.mkstemp(prefix="fabricx-")
        os.unlink(path)
    os.ftruncate(file, max(1, size))
    return file


def mapped(file: int, dtype: torch.dtype, elements: int) -> Tensor:
    """Return a vector in a file, which is closed; the memory stays as long as the vector."""
    memory = mmap.mmap(file, max(1, elements * dtype.itemsize))
    os.close(file)
    return torch.frombuffer(memory, dtype=dtype, count=elements) if elements else torch.empty(0, dtype=dtype)


def meet_over_gloo(
    store: dist.Store, name: str, hello: Handshake, key: bytes, *, server: bool, before: Link | None = None,
    timeout: timedelta = MEET,
) -> Link:  # fmt: skip
    """Return one end of a link between machines; waits for the other end, which gives the same name and key.

    The operations of the link have no time-out of their own: the end of the peer process ends them.

    Args:
        store: where both ends meet.
        name: of the link.
        hello: of the worker.
        key: of the run.
        server: which end this is.
        before: a link that has ended, whose vectors the new one takes over.
        timeout: of the wait for the other end.

    Raises:
        RuntimeError: the other end did not connect in that time.
        AuthenticationError: on both ends: another program has connected in the place of one.
    """
    place, meeting = 1 if server else 0, dist.PrefixStore(name, store)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    with _LISTENING:
        others = peers.ports()
        options._devices = _devices()
        own = peers.ports() - others
    options._timeout, options._threads = timeout, 2 * len(options._devices)
    group = dist.ProcessGroupGloo(meeting, place, 2, options)  # type: ignore[attr-defined]
    peers.confirm(meeting, place, 2, own, timeout, lambda: None)
    return Gloo(group, hello, key, name, server=server, before=before)


def _devices() -> list[Any]:
    """Return what gloo listens with, as it would choose it; who connects is checked afterwards, so it does at once."""
    gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
    return [gloo.create_default_device(lazy_init=False)]
