"""Memory that all ranks of a machine map, with connections between all pairs of ranks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.activity.message_counts import MessageCounts
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.messages import authentication
from fabricx.distributed.shared_memory.vectors import anonymous_file, map_vector
from fabricx.errors import PeerLost
from fabricx.scratch import private_folder

if TYPE_CHECKING:
    from fabricx.distributed.world import World

SOCKET_NAME: Final = "door"  # file name of a Unix socket
_SIGNAL: Final = b"\0"


@final
class SharedMemoryGroup:
    """A shared vector per rank, which all ranks can read and write, and messages between all ranks.

    If a rank dies, every other rank detects it at its next receive from that rank.

    Args:
        store: store for the rendezvous; None for a single rank.
        key: key of this group in the store.
        rank, size: number of this rank, and number of ranks.
        dtype, elements: of the vectors.
        generation: generation of all ranks.
        secret: key of the run.
        timeout_s: maximum time to wait for a message or signal of another rank, in seconds; 0: no limit.
        ranks_of_run: ranks of the run, for the report of a hang; None if they are those of the group.

    Attributes:
        rank: see Args.
        vectors: vectors by rank.

    Raises:
        ValueError: the ranks are on different machines.
    """

    def __init__(
        self, store: dist.Store | None, key: str, rank: int, size: int, dtype: torch.dtype, elements: int,
        generation: int = 0, secret: bytes = b"", timeout_s: int = 0, ranks_of_run: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self._generation, self._secret, self._timeout_s = rank, generation, secret, timeout_s
        self._others: dict[int, Connection] = {}
        of_run = range(size) if ranks_of_run is None else ranks_of_run
        self._events = [f"exchange in shared memory with rank {number}" for number in of_run]
        self._counts = MessageCounts(key, of_run, "exchange in shared memory")
        self._received = 0  # messages and signals of each other rank
        vectors: dict[int, Tensor] = {}
        local = anonymous_file(elements * dtype.itemsize)
        if store is not None and size > 1:
            self._meet(store, key, local, vectors, dtype, elements, size)
        for connection in self._others.values():
            with socket.socket(fileno=os.dup(connection.fileno())) as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", timeout_s, 0))
        self._numbers = [connection.fileno() for connection in self._others.values()]
        vectors[rank] = map_vector(local, dtype, elements)
        self.vectors = [vectors[number] for number in range(size)]

    def _meet(
        self, store: dist.Store, key: str, local: int, vectors: dict[int, Tensor], dtype: torch.dtype, elements: int,
        size: int,
    ) -> None:  # fmt: skip
        """Connect to all other ranks: a rank connects to lower ranks, and accepts higher ranks."""
        with private_folder() as folder:
            door = authentication.listen(folder, SOCKET_NAME)
            store.set(f"{key}/{self.rank}", f"{socket.gethostname()}:{os.path.join(folder, SOCKET_NAME)}")
            for other in range(self.rank):
                self._wait_until(functools.partial(store.check, [f"{key}/{other}"]))
                path = _path(store.get(f"{key}/{other}").decode(), other)
                connection: Any = authentication.connect(path, self._secret)
                connection.send(self.rank)
                self._others[other] = connection
                reduction.send_handle(connection, local, 0)
                vectors[other] = map_vector(reduction.recv_handle(connection), dtype, elements)
            for _ in range(self.rank + 1, size):
                connection = None
                while connection is None:
                    self._wait_until(lambda: wait([door], 0.02))
                    connection = authentication.accept(door, self._secret)
                other = connection.recv()
                self._others[other] = connection
                vectors[other] = map_vector(reduction.recv_handle(connection), dtype, elements)
                reduction.send_handle(connection, local, 0)
            door.close()

    def _wait_until(self, ready: Callable[[], Any]) -> None:
        """Wait for another rank; raises an error if a rank has died."""
        while not ready():
            membership().check(self._generation)
            time.sleep(0.001)

    def send_all(self, message: Any) -> None:
        """Send a message to all other ranks.

        Args:
            message: can be pickled.
        """
        self._counts.sent += 1
        for connection in self._others.values():
            connection.send(message)

    def recv_all(self) -> dict[int, Any]:
        """Receive the next message of each other rank, by rank.

        Raises:
            EOFError: a rank has died.
        """
        messages = {}
        self._received += 1
        self._counts.awaited = self._received
        try:
            for rank, connection in self._others.items():
                heartbeat.waits_for(self._events[rank])
                messages[rank] = connection.recv()
        finally:
            self._counts.awaited = 0
            heartbeat.waits_for("")
        return messages

    def signal(self) -> None:
        """Send a signal to all other ranks. Signals and messages must not be mixed without a wait for all ranks.

        Raises:
            OSError: a rank has died.
        """
        self._counts.sent += 1
        for number in self._numbers:
            os.write(number, _SIGNAL)

    def await_signals(self) -> None:
        """Wait for the next signal of each other rank.

        Raises:
            EOFError: a rank has died, or the group has ended.
            TimeoutError: a rank has sent no signal within the time limit.
        """
        self._received += 1
        self._counts.awaited = self._received
        try:
            for rank, number in zip(self._others, self._numbers, strict=True):
                heartbeat.waits_for(self._events[rank])
                if not os.read(number, 1):
                    raise EOFError(f"the connection to rank {rank} has ended")
        except BlockingIOError as error:
            raise TimeoutError(f"rank {rank} has sent no signal for {self._timeout_s} s") from error
        finally:
            self._counts.awaited = 0
            heartbeat.waits_for("")

    def share_file(self, file: int) -> int:
        """Distribute the first rank's file to all ranks.

        Args:
            file: this rank's file descriptor; closed on all ranks but the first.

        Returns:
            Descriptor of the first rank's file.
        """
        if not self._others:
            return file
        if self.rank:
            os.close(file)
            return int(reduction.recv_handle(self._others[0]))  # type: ignore[arg-type]
        for connection in self._others.values():
            reduction.send_handle(connection, file, 0)  # type: ignore[arg-type]
        return file

    def close(self) -> None:
        """Close all connections; the vectors stay valid."""
        self._counts.close()
        for connection in self._others.values():
            connection.close()


@contextlib.contextmanager
def detects_lost_ranks(ranks: World) -> Iterator[None]:
    """Context that converts errors of the connections to other ranks.

    Args:
        ranks: ranks of the group.

    Raises:
        PeerLost: a connection has ended.
    """
    try:
        yield
    except TimeoutError:
        raise
    except (EOFError, OSError) as error:
        raise PeerLost(
            f"rank {ranks.rank} of {ranks.size}: the connection to another rank was lost: {error}"
        ) from error


@final
class RemappableBuffer:
    """A vector that can be switched between shared and private memory at the same address, so that views stay valid.

    It is private at first.

    Args:
        group: process group of the ranks; all of them call this.
        dtype, elements: of the vector.

    Attributes:
        vector: see above.
        private: each rank has its own memory; otherwise all ranks share it.
    """

    def __init__(self, group: SharedMemoryGroup, dtype: torch.dtype, elements: int) -> None:
        self._group = group
        self._size = max(1, elements * dtype.itemsize)
        self._file = group.share_file(anonymous_file(self._size))
        self.vector = map_vector(os.dup(self._file), dtype, elements)
        self._map(mmap.MAP_PRIVATE)
        self.private = True

    def share(self) -> None:
        """Map shared memory with the values of the first rank; every rank calls it."""
        if self._group.rank == 0:
            kept = self.vector.clone()
            self._map(mmap.MAP_SHARED)
            self.vector.copy_(kept)
        self._group.send_all(None)
        self._group.recv_all()
        if self._group.rank:
            self._map(mmap.MAP_SHARED)
        self.private = False

    def unshare(self) -> None:
        """Map private memory with the shared values; no rank writes to the shared memory before the next `share`."""
        self._map(mmap.MAP_PRIVATE)
        self.private = True

    def close(self) -> None:
        """Close the shared file; the vector stays valid."""
        os.close(self._file)

    def _map(self, how: int) -> None:
        """Map the file at the vector's address."""
        address, fixed = self.vector.data_ptr(), 0x10
        if not len(self.vector):
            return
        mapped = _libc().mmap(address, self._size, mmap.PROT_READ | mmap.PROT_WRITE, how | fixed, self._file, 0)
        if mapped != address:
            raise OSError(ctypes.get_errno(), "memory couldn't be mapped again")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = [word, ctypes.c_size_t, number, number, number, ctypes.c_long]
    libc.mmap.restype = word
    return libc


def _path(address: str, rank: int) -> str:
    host, _, path = address.partition(":")
    if host != socket.gethostname():
        raise ValueError(
            f"rank {rank} is on {host} and this rank on {socket.gethostname()}: ranks of two machines share no memory"
        )
    return path
