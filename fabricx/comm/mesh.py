"""Memory that all ranks of one machine see, and a bell between each two of them."""

from __future__ import annotations

import os
import socket
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, final

import torch
from torch import Tensor

from fabricx.comm.links import Store, mapped, nameless


@final
class Mesh:
    """One vector of each rank, which all can read and write, and messages from each to each.

    A rank that dies is noticed by all others at once, when they next wait for it.

    Args:
        store: where ranks find each other; None for a single one.
        key: of this mesh in it.
        rank, size: which of how many.
        dtype, elements: of the vectors.

    Raises:
        ValueError: the ranks aren't all on one machine.
    """

    def __init__(self, store: Store | None, key: str, rank: int, size: int, dtype: torch.dtype, elements: int) -> None:
        self._rank = rank
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
        with tempfile.TemporaryDirectory(prefix="fabricx-") as folder:
            door = Listener(os.path.join(folder, "door"), "AF_UNIX", backlog=size)
            store.set(f"{key}/{self._rank}", f"{socket.gethostname()}:{door.address}")
            for other in range(self._rank):
                connection: Any = Client(_path(store.get(f"{key}/{other}").decode(), other), "AF_UNIX")
                connection.send(self._rank)
                self._others[other] = connection
                reduction.send_handle(connection, own, 0)
                vectors[other] = mapped(reduction.recv_handle(connection), dtype, elements)
            for _ in range(self._rank + 1, size):
                connection = door.accept()
                other = connection.recv()
                self._others[other] = connection
                vectors[other] = mapped(reduction.recv_handle(connection), dtype, elements)
                reduction.send_handle(connection, own, 0)
            door.close()

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

    def close(self) -> None:
        """Leave it."""
        for connection in self._others.values():
            connection.close()


def _path(address: str, rank: int) -> str:
    host, _, path = address.partition(":")
    if host != socket.gethostname():
        raise ValueError(
            f"rank {rank} is on {host} and this one on {socket.gethostname()}: workers without servers have to be on "
            "one machine; say servers=1, or take strategy=ddp"
        )
    return path
