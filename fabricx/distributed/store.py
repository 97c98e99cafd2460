"""Client of the run's key-value store, through which the processes of a run find each other.

torch's TCPStore listens on a network port without authentication, and lists all its keys to each connection. Its
FileStore keeps half a record when a writer is killed, at which all readers spin for ever. So each run has a store of
its own (`store_server.py`): behind a Unix socket in the run's private folder, or across machines with signed messages.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist

from fabricx.distributed import authentication
from fabricx.distributed.authentication import AuthenticationError
from fabricx.distributed.store_server import Channel, pack, unpack

_KEPT: Final[list[dist.Store]] = []  # torch calls a store's Python methods only while Python refers to it


@final
class PrivateStore(dist.Store):
    """A process's access to the store of its run, for any number of threads.

    Each request takes a connection that no other request uses, so that a thread that waits holds up no other thread. A
    new connection takes less than 1 ms. Errors are those of torch's TCPStore.

    Args:
        address: path of the server's Unix socket, or host name and port.
        key: of the run.

    Attributes:
        peer: what the system calls the server's end of a connection over a Unix socket.
        port: of the server, if it is on the network.

    Raises:
        torch.distributed.DistNetworkError: the server can't be reached, or this process doesn't have its key.
    """

    def __init__(self, address: str | tuple[str, int], key: bytes) -> None:
        super().__init__()
        self.timeout: timedelta
        self._address, self._key = address, key
        self.path = address if isinstance(address, str) else ""
        self.port = 0 if isinstance(address, str) else address[1]
        self.peer: Any = ""
        self._idle: deque[Channel] = deque([self._connected()])
        _KEPT.append(self)

    def clone(self) -> PrivateStore:
        """Return this store: its threads never wait for each other."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._request(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value; waits for it until `timeout`."""
        return self._wait([key], self.timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, from 0; returns its value."""
        return int(self._request(b"add", key.encode(), str(amount).encode()))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present one is as expected; returns the value after that."""
        return self._request(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return bool(self._request(b"delete_key", key.encode()))

    deleteKey = delete_key  # noqa: N815 - torch's name for it where C++ calls Python

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._request(b"check", *(key.encode() for key in keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            torch.distributed.DistStoreError: some don't when the time is over.
        """
        self._wait(keys, self.timeout if timeout is None else timeout)

    def has_extended_api(self) -> bool:
        """Return whether there are append, multi_get and multi_set; torch goes without."""
        return False

    def _wait(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        if not keys:
            return []
        seconds = timeout.total_seconds()
        answer = self._request(b"wait", str(seconds).encode(), *(key.encode() for key in keys))
        if not answer:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")
        return unpack(answer)

    def _request(self, *parts: bytes) -> bytes:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        try:
            connection.send_bytes(pack(*parts))
            answer = connection.recv_bytes()
        except (EOFError, OSError, AuthenticationError) as error:
            connection.close()
            raise dist.DistNetworkError(f"the connection to the run's store was lost: {error!r}") from error
        except BaseException:
            connection.close()  # an answer may still come
            raise
        self._idle.append(connection)
        return answer

    def _connected(self) -> Channel:
        try:
            if isinstance(self._address, tuple):
                return authentication.connect_to(self._address, self._key)
            connection = authentication.connect(self._address, self._key)
            with socket.socket(fileno=os.dup(connection.fileno())) as ours:
                self.peer = ours.getpeername()
            return connection
        except (EOFError, OSError) as error:
            raise dist.DistNetworkError(f"the run's store at {self._address} can't be reached: {error!r}") from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
