"""Links between a worker and a server: shared memory on the same machine, gloo between machines.

A link sends small messages and, before some of them, a vector. An operation on a link fails as soon as the peer process
has died. `connecting.py` opens links.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx import by_value
from fabricx.distributed.messages import authentication

LINK_ERRORS: Final = (EOFError, OSError, RuntimeError)  # errors of a link whose peer has died
MAX_GLOO_BYTES: Final = 1 << 22  # maximum bytes of a gloo operation
CLOSE: Final = timedelta(seconds=5)  # timeout of the last messages
UNLIMITED: Final = timedelta(days=365)  # timeout of a receive, which the end of the peer process ends


@dataclass(slots=True)
class Handshake:
    """Introduction of a worker to a server.

    Attributes:
        worker: number of the worker.
        dtype: data type of the vectors.
        to_server: elements of the vector from the worker to the server.
        to_worker: elements of the vector from the server; None if it replaces the worker's vector in the same memory.
        generation: generation of the workers in lockstep; None for workers at their own pace.
        resumes: this worker had an earlier link to the server, with the same vectors and message numbers.
    """

    worker: int
    dtype: torch.dtype
    to_server: int
    to_worker: int | None
    generation: int | None = 0
    resumes: bool = False

    def dumps(self, key: bytes, store_key: str) -> bytes:
        """Return this handshake as signed bytes.

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
        handshake, inbox, outbox: see Attributes.

    Attributes:
        handshake: introduction of the worker.
        inbox: vector into which parts were received with the newest message.
        outbox: vector from which parts are sent.
        sent, received: bytes of vectors.
        arrived: called with the end position of each part that is received before its message.
    """

    def __init__(self, handshake: Handshake, inbox: Tensor, outbox: Tensor) -> None:
        self.handshake = handshake
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
class SharedMemoryLink(Link):
    """Link whose vectors are in memory that both processes map, with a Unix socket for messages.

    Args:
        connection: connection of the socket.
        handshake: introduction of the worker.
        inbox, outbox: vectors in shared memory.
        files: file descriptors of the vectors, closed with the link; until then, another link can reuse the memory.
    """

    def __init__(
        self, connection: Connection, handshake: Handshake, inbox: Tensor, outbox: Tensor, files: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(handshake, inbox, outbox)
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
class GlooLink(Link):
    """Link through a gloo process group of two, which is independent of all other groups.

    A header of three integers precedes each part and each message: (bytes of a message, 0, 0) or (0, start, stop) of a
    part. Gloo sends in its own threads when the peer receives, in the order of the operations.

    Args:
        group: process group with the worker as rank 0 and the server as rank 1.
        handshake: introduction of the worker.
        key: secret of the run.
        name: name of the link, unique in the run.
        server: this end is the server's.
        previous: a link that has ended, whose vectors are reused.
    """

    def __init__(
        self, group: Any, handshake: Handshake, key: bytes, name: str, *, server: bool, previous: Link | None = None
    ) -> None:  # fmt: skip
        if previous is None:
            sizes = handshake.to_server, handshake.to_server if handshake.to_worker is None else handshake.to_worker
            to_server, to_worker = (torch.zeros(size, dtype=handshake.dtype) for size in sizes)
            super().__init__(handshake, to_server if server else to_worker, to_worker if server else to_server)
        else:
            super().__init__(handshake, previous.inbox, previous.outbox)
        self._group, self._peer = group, 0 if server else 1
        self._key, self._name = key, name
        self._messages = [0, 0]  # numbers of sent and received messages, signed to prevent replays
        self._pending: list[tuple[Any, Tensor]] = []  # sends with their tensors

    def post(self, start: int, stop: int) -> None:
        outbox = self.outbox.view(torch.uint8)
        for low in range(start, stop, MAX_GLOO_BYTES):
            high = min(low + MAX_GLOO_BYTES, stop)
            self._begin_to_send(torch.tensor([0, low, high]))
            self._begin_to_send(outbox[low:high])
        self.sent += stop - start

    def send(self, message: Any) -> None:
        context = [self._name, 1 - self._peer, self._messages[0]]
        data = torch.frombuffer(bytearray(authentication.dumps(self._key, context, message)), dtype=torch.uint8)
        self._messages[0] += 1
        self._begin_to_send(torch.tensor([len(data), 0, 0]))
        for low in range(0, len(data), MAX_GLOO_BYTES):
            self._begin_to_send(data[low : low + MAX_GLOO_BYTES])

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
                for low in range(0, length, MAX_GLOO_BYTES):
                    self._receive(data[low : low + MAX_GLOO_BYTES])
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
