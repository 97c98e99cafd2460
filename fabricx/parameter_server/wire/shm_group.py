"""Shared memory of all ranks of one machine, with a signal between each two ranks."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, final

import torch
from torch import Tensor

from fabricx.distributed import authentication
from fabricx.distributed.generations import membership
from fabricx.parameter_server.wire.channel import DOOR, Store, mapped, nameless
from fabricx.scratch import private_folder


@final
class SharedMemoryGroup:
    """One vector of each rank, which all can read and write, and messages from each to each.

    A rank that dies is noticed by all others at once, when they next wait for it.

    Args:
        store: where ranks find each other; None for a single one.
        key: of this mesh in it.
        rank, size: which of how many.
        dtype, elements: of the vectors.
        generation: that all of them are of.
        secret: the run's key, which each of them has to have.

    Attributes:
        rank: see above.
        vectors: by rank.

    Raises:
        ValueError: the ranks aren't all on one machine.
    """

    def __init__(
        self, store: Store | None, key: str, rank: int, size: int, dtype: torch.dtype, elements: int,
        generation: int = 0, secret: bytes = b"",
    ) -> None:  # fmt: skip
        self.rank, self._generation, self._secret = rank, generation, secret
        self._others: dict[int, Connection] = {}
        vectors: dict[int, Tensor] = {}
        own = nameless(elements * dtype.itemsize)
        if store is not None and size > 1:
            self._meet(store, key, own, vectors, dtype, elements, size)
        vectors[rank] = mapped(own, dtype, elements)
        self.vectors = [vectors[number] for number in range(size)]

    def _meet(
        self, store: Store, key: str, own: int, vectors: dict[int, Tensor], dtype: torch.dtype, elements: int, size: int
    ) -> None:  # fmt: skip
        """Get to know each other rank: a rank goes to those before it, and lets those after it in."""
        with private_folder() as folder:
            door = authentication.listen(folder, DOOR)
            store.set(f"{key}/{self.rank}", f"{socket.gethostname()}:{os.path.join(folder, DOOR)}")
            for other in range(self.rank):
                self._wait_until(functools.partial(store.check, [f"{key}/{other}"]))
                path = _path(store.get(f"{key}/{other}").decode(), other)
                connection: Any = authentication.connect(path, self._secret)
                connection.send(self.rank)
                self._others[other] = connection
                reduction.send_handle(connection, own, 0)
                vectors[other] = mapped(reduction.recv_handle(connection), dtype, elements)
            for _ in range(self.rank + 1, size):
                connection = None
                while connection is None:
                    self._wait_until(lambda: wait([door], 0.02))
                    connection = authentication.accept(door, self._secret)
                other = connection.recv()
                self._others[other] = connection
                vectors[other] = mapped(reduction.recv_handle(connection), dtype, elements)
                reduction.send_handle(connection, own, 0)
            door.close()

    def _wait_until(self, ready: Callable[[], Any]) -> None:
        """Wait for another rank, which may be dead by now."""
        while not ready():
            membership().check(self._generation)
            time.sleep(0.001)

    def tell(self, message: Any) -> None:
        """Send a message to all others."""
        for connection in self._others.values():
            connection.send(message)

    def hear(self) -> dict[int, Any]:
        """Wait for the next message of each other rank; returns them by rank.

        Raises:
            EOFError: one has died.
        """
        return {rank: connection.recv() for rank, connection in self._others.items()}

    def give(self, file: int) -> int:
        """Give all others the first rank's file; returns it."""
        if not self._others:
            return file
        if self.rank:
            os.close(file)
            return int(reduction.recv_handle(self._others[0]))  # type: ignore[arg-type]
        for connection in self._others.values():
            reduction.send_handle(connection, file, 0)  # type: ignore[arg-type]
        return file

    def close(self) -> None:
        """Leave it; the vectors stay as long as somebody has them."""
        for connection in self._others.values():
            connection.close()


@final
class RemappableBuffer:
    """A vector that is one for all ranks, or each rank's own: at the same address, so that views of it stay views.

    It is each rank's own at first.

    Args:
        mesh: of the ranks; all of them call this.
        dtype, elements: of the vector.

    Attributes:
        vector: see above.
    """

    def __init__(self, mesh: SharedMemoryGroup, dtype: torch.dtype, elements: int) -> None:
        self._mesh = mesh
        self._size = max(1, elements * dtype.itemsize)
        self._file = mesh.give(nameless(self._size))
        self.vector = mapped(os.dup(self._file), dtype, elements)
        self._map(mmap.MAP_PRIVATE)
        self.apart = True

    def come_together(self) -> None:
        """Let all ranks have the same memory from now on, with what the first rank's has been; all call it."""
        if self._mesh.rank == 0:
            kept = self.vector.clone()
            self._map(mmap.MAP_SHARED)
            self.vector.copy_(kept)
        self._mesh.tell(None)
        self._mesh.hear()
        if self._mesh.rank:
            self._map(mmap.MAP_SHARED)
        self.apart = False

    def go_apart(self) -> None:
        """Let this rank's be its own from now on, with what it was; nobody changes it before all come together."""
        self._map(mmap.MAP_PRIVATE)
        self.apart = True

    def close(self) -> None:
        """Share it no more; the vector stays."""
        os.close(self._file)

    def _map(self, how: int) -> None:
        """Put the file into the place of what is at the vector's address."""
        address, fixed = self.vector.data_ptr(), 0x10
        if not len(self.vector):
            return
        found = _libc().mmap(address, self._size, mmap.PROT_READ | mmap.PROT_WRITE, how | fixed, self._file, 0)
        if found != address:
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
            f"rank {rank} is on {host} and this one on {socket.gethostname()}: workers without servers have to be on "
            "one machine; say servers=1, or take strategy=ddp"
        )
    return path
