"""Client of the run's key-value store, which the processes of a run use for rendezvous.
torch's TCPStore listens on a network port without authentication and lists all keys to every connection. Its FileStore
contains half a record after a writer was killed, and all readers then spin forever. Therefore each run has its own
store (`store_server.py`): behind a Unix socket in the run's private folder or, across machines, with signed messages.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist

from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.authentication import AuthenticationError, SignedConnection
from fabricx.distributed.store.connections import Channel, shut
from fabricx.distributed.store.state import pack, unpack

_KEPT: Final[list[dist.Store]] = []  # torch calls Python methods of a store only while a Python reference exists


@final
class PrivateStore(dist.Store):
    """Thread-safe client of the run's store.

    Each request uses a connection that no concurrent request uses, so a waiting thread never blocks another thread. A
    new connection takes less than 1 ms. It raises the errors of torch's TCPStore.

    Args:
        address: path of the server's Unix socket, or (host name, port).
        key: secret of the run.

    Attributes:
        peer: address of the server's end of a Unix socket connection, as `getpeername` returns it.
        port: TCP port of the server; 0 for a Unix socket.

    Raises:
        torch.distributed.DistNetworkError: the server can't be reached or has a different key.
    """

    def __init__(self, address: str | tuple[str, int], key: bytes) -> None:
        super().__init__()
        self.timeout: timedelta
        self._address, self._key = address, key
        self.path = address if isinstance(address, str) else ""
        self.port = 0 if isinstance(address, str) else address[1]
        self.peer: Any = ""
        self._idle: deque[Channel] = deque([self._connected()])
        self._kept: list[Channel] = []  # open until this process ends
        _KEPT.append(self)

    def clone(self) -> PrivateStore:
        """Return this store, which is safe for any number of threads."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value.

        Args:
            key: name of the value.
            value: text, or bytes.
        """
        self._request(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value; wait until it exists, at most `timeout`.

        Args:
            key: name of the value.

        Raises:
            torch.distributed.DistStoreError: the value does not exist within the time.
        """
        return self._wait([key], self.timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, and return its new value.

        Args:
            key: name of the counter.
            amount: number to add.
        """
        return int(self._request(b"add", key.encode(), str(amount).encode()))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present value is `expected` (or missing), and return the value afterwards.

        Args:
            key: name of the value.
            expected: present value.
            desired: new value.
        """
        return self._request(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))

    def raise_to(self, key: str, least: int) -> None:
        """Set a number if the present value is smaller or missing.

        Args:
            key: name of the number.
            least: the number.
        """
        self._request(b"raise_to", key.encode(), str(least).encode())

    def push_at_end(self, name: str, value: str, *, soon: bool = False) -> None:
        """Make the server append a value to a sequence at the end of this process, also after a crash.

        Args:
            name: name of the sequence; the values have the keys `name/0`, `name/1`, ...
            value: the value.
            soon: append it 6 s after this machine has become unreachable, not after 30 s.
        """
        connection = self._connected()
        self._ask(connection, b"push_at_end", name.encode(), value.encode(), b"1" if soon else b"")
        self._kept.append(connection)

    def delete_key(self, *keys: str) -> bool:
        """Delete values, and return whether all of them existed.

        Args:
            keys: names of the values.
        """
        return bool(self._request(b"delete_key", *(key.encode() for key in keys)))

    deleteKey = delete_key  # noqa: N815 - name of the method that torch's C++ code calls

    def values(self, keys: list[str]) -> list[bytes]:
        """Return values that exist, by a single request.

        Args:
            keys: names of the values.

        Raises:
            torch.distributed.DistStoreError: a value does not exist.
        """
        return self._wait(keys, timedelta())

    def check(self, keys: list[str]) -> bool:
        """Return whether all values exist.

        Args:
            keys: names of the values.
        """
        return bool(self._request(b"check", *(key.encode() for key in keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Args:
            keys: keys to wait for.
            timeout: maximum time; None for the store's `timeout`.

        Raises:
            torch.distributed.DistStoreError: a key is missing at the timeout.
        """
        self._wait(keys, self.timeout if timeout is None else timeout)

    def reach(self, numbers: Mapping[str, int], seconds: float) -> list[str]:
        """Wait until any of several numbers is large enough.

        Args:
            numbers: least values, by key.
            seconds: maximum time to wait.

        Returns:
            The keys of the numbers that are; [] at the timeout.
        """
        conditions = (part.encode() for key, least in numbers.items() for part in (key, str(least)))
        return [key.decode() for key in unpack(self._request(b"reach", str(seconds).encode(), *conditions))[::2]]

    def has_extended_api(self) -> bool:
        """Return False: append, multi_get and multi_set are not supported; torch then does without them."""
        return False

    def watch(self, *, soon: bool = False) -> Watch:
        """Return a wait that other threads can interrupt.

        Args:
            soon: it fails 6 s after the server's machine has become unreachable, not after 30 s.
        """
        return Watch(self, soon=soon)

    def _wait(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        if not keys:
            return []
        seconds = timeout.total_seconds()
        answer = unpack(self._request(*_waiting(keys, seconds, every=True)))
        if not answer:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")
        return answer[1::2]

    def _request(self, *parts: bytes) -> bytes:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        answer = self._ask(connection, *parts)
        self._idle.append(connection)
        return answer

    @staticmethod
    def _ask(connection: Channel, *parts: bytes) -> bytes:
        try:
            connection.send_bytes(pack(*parts))
            return connection.recv_bytes()
        except (EOFError, OSError, AuthenticationError) as error:
            connection.close()
            raise dist.DistNetworkError(f"the connection to the run's store was lost: {error!r}") from error
        except BaseException:
            connection.close()  # a late answer would be read as the answer of the next request
            raise

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


@final
class Watch:
    """A wait for any of several keys; the store answers when a key is set, without further requests.

    Args:
        store: the run's store.
        soon: see `PrivateStore.watch`.
    """

    def __init__(self, store: PrivateStore, *, soon: bool = False) -> None:
        self._store, self._soon = store, soon
        self._lock = threading.Lock()
        self._connection: Channel | None = None
        self._interrupted = False

    def wait_any(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until a key exists.

        Args:
            keys: a key or several keys.
            seconds: maximum time to wait.

        Returns:
            The keys that exist; [] at the timeout, or after an interrupt.

        Raises:
            torch.distributed.DistNetworkError: the store has ended.
        """
        with self._lock:
            if self._interrupted:
                self._end()
                return []
            if self._connection is None:
                self._connection = self._store._connected()
                if self._soon and isinstance(self._connection, SignedConnection):
                    self._connection.detect_loss_soon()
            connection = self._connection
        try:
            connection.send_bytes(pack(*_waiting(keys, seconds, every=False)))
            return [key.decode() for key in unpack(connection.recv_bytes())[::2]]
        except (EOFError, OSError, AuthenticationError) as error:
            with self._lock:
                interrupted = self._interrupted
                self._end()
            if interrupted:
                return []
            raise dist.DistNetworkError(f"the connection to the run's store was lost: {error!r}") from error

    def interrupt(self) -> None:
        """End the present wait, or the next if no thread waits; may be called from any thread."""
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                shut(self._connection.fileno())

    def close(self) -> None:
        """Close the connection; no thread waits."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._interrupted = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _waiting(keys: Sequence[str], seconds: float, *, every: bool) -> list[bytes]:
    return [b"wait", str(seconds).encode(), b"1" if every else b"", *(key.encode() for key in keys)]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
