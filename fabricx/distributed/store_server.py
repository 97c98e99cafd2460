"""Server of a run's key-value store, for processes with the run's key only; does not import torch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Final, final

from fabricx.distributed import authentication
from fabricx.distributed.authentication import AuthenticationError, SignedConnection

Channel = Connection | SignedConnection
SOCKET: Final = "store"  # name of the Unix socket in the run's folder
LOOK_S: Final = 1.0  # interval at which a waiting request checks whether its process still exists
UNPROVEN: Final = 512  # maximum connections before authentication; a further connection closes the oldest


def pack(*parts: bytes) -> bytes:
    """Join byte strings to one message.

    Args:
        parts: contents, each of less than 4 GiB.
    """
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """Split a message of `pack` into its parts.

    Args:
        data: concatenation of (4 bytes of length, little-endian; content).
    """
    parts, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        parts.append(data[at + 4 : end])
        at = end
    return parts


@final
class StoreServer:
    """Serves a store to the processes of one run, with one thread per connection.

    Args:
        folder: the run's private folder for the Unix socket; None to listen on the network, where each message is
            signed.
        key: secret of the run; connections without proof of the key are closed.

    Attributes:
        path: path of the Unix socket; "" on the network.
        port: TCP port on the network, else 0.
    """

    def __init__(self, folder: str | None, key: bytes) -> None:
        self.path, self.port = "", 0
        if folder is None:
            self._listener = authentication.listen_on_network()
            self.port = self._listener.getsockname()[1]
        else:
            self._listener = authentication.listen(folder, SOCKET)
            self.path = os.path.join(folder, SOCKET)
        self._key = key
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()  # reentrant: a signal handler may set a value
        self._closed = False
        self._connections: set[Channel] = set()
        self._at_end: dict[Channel, str] = {}  # keys to set when a connection ends
        self._unproven: deque[socket.socket] = deque()
        self._thread = threading.Thread(target=self._accept, name="fabricx-store", daemon=True)
        self._thread.start()

    @property
    def used(self) -> bool:
        """Return whether a process is connected."""
        return bool(self._connections)

    def set(self, key: str, value: bytes) -> None:
        """Set a value, in the process that hosts the store.

        Args:
            key: key of the value.
            value: any bytes.
        """
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes | None:
        """Return a value, in the process that hosts the store; None if the key does not exist.

        Args:
            key: key of the value.
        """
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Return whether a key exists.

        Args:
            key: any key.
        """
        return key in self._values

    def close(self) -> None:
        """End all connections and threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for connection in self._connections:
                _shut(connection.fileno())
            for peer in self._unproven:
                _shut(peer.fileno())
        _shut(self._listener.fileno())  # wakes the accepting thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
                with self._changed:
                    self._unproven.append(peer)
                    if len(self._unproven) > UNPROVEN:
                        _shut(self._unproven.popleft().fileno())
                threading.Thread(target=self._serve, args=(peer,), name="fabricx-store", daemon=True).start()
            except (OSError, RuntimeError):  # closed, or out of file descriptors or threads
                if not self._closed:
                    time.sleep(0.1)

    def _serve(self, peer: socket.socket) -> None:
        connection = authentication.admit(peer, self._key)
        with self._changed:
            with contextlib.suppress(ValueError):
                self._unproven.remove(peer)
            if connection is None:
                return
            if self._closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            while True:
                operation, *arguments = unpack(connection.recv_bytes())
                answer: bytes = getattr(self, f"_do_{operation.decode()}")(connection, *arguments)
                connection.send_bytes(answer)
        except (EOFError, OSError, AuthenticationError):
            pass  # the process has ended, or a message was altered: close the connection
        finally:
            with self._changed:
                self._connections.discard(connection)
                if (key := self._at_end.pop(connection, None)) is not None:
                    self.set(key, b"")
                connection.close()

    # -- operations ---------------------------------------------------------------------------------------------

    def _do_set(self, connection: Channel, key: bytes, value: bytes) -> bytes:
        self.set(key.decode(), value)
        return b""

    def _do_wait(self, connection: Channel, seconds: bytes, *keys: bytes) -> bytes:
        """Wait for keys, and return their values; returns an empty answer at the timeout."""
        names = [key.decode() for key in keys]
        deadline = time.monotonic() + float(seconds)
        with self._changed:
            while not all(name in self._values for name in names):
                rest = deadline - time.monotonic()
                if self._closed or rest <= 0:
                    return b""
                if connection.poll():  # a client sends nothing while it waits, so its end of the connection has closed
                    raise EOFError
                self._changed.wait(min(rest, LOOK_S))
            return pack(*(self._values[name] for name in names))

    def _do_add(self, connection: Channel, key: bytes, amount: bytes) -> bytes:
        with self._changed:
            value = str(int(self._values.get(key.decode(), b"0")) + int(amount)).encode()
            self.set(key.decode(), value)
            return value

    def _do_compare_set(self, connection: Channel, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            current = self._values.get(key.decode())
            if current == expected or (current is None and not expected):
                self.set(key.decode(), desired)
                return desired
            return expected if current is None else current

    def _do_delete_key(self, connection: Channel, key: bytes) -> bytes:
        with self._changed:
            return b"" if self._values.pop(key.decode(), None) is None else b"1"

    def _do_set_at_end(self, connection: Channel, key: bytes) -> bytes:
        self._at_end[connection] = key.decode()  # this connection's thread only reads and changes this entry
        return b""

    def _do_check(self, connection: Channel, *keys: bytes) -> bytes:
        with self._changed:
            return b"1" if all(key.decode() in self._values for key in keys) else b""


def _shut(number: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
