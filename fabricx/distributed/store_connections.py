"""Connections of processes to the server of a run's store: their messages, and requests that wait for keys."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Final, final

from fabricx.distributed import authentication
from fabricx.distributed.authentication import SignedConnection

Channel = Connection | SignedConnection
_READ: Final = 1 << 16  # bytes that are read at a time
_LARGE: Final = -1  # length of a message in `multiprocessing.connection` that stands before a length of 8 bytes


def pack(*parts: bytes) -> bytes:
    """Join byte strings to a message.

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
class Wait:
    """A request that is answered when keys exist.

    Args:
        peer: the connection that waits.
        keys: names of the keys, with the least number as which a key exists; None for any value.
        every: all of the keys have to exist; otherwise any of them is enough.
    """

    def __init__(self, peer: Peer, keys: Mapping[str, int | None], *, every: bool) -> None:
        self.peer, self.keys, self.every = peer, keys, every
        self.missing = set(keys)

    @property
    def pending(self) -> bool:
        """Return whether the request is not answered yet."""
        return self.peer.wait is self

    def found(self, values: Mapping[str, bytes]) -> list[str]:
        """Return the keys that exist if their existence meets the condition, else [].

        Args:
            values: the store's.
        """
        existing = [key for key, least in self.keys.items() if reached(values.get(key), least)]
        self.missing.difference_update(existing)
        return existing if not self.every or len(existing) == len(self.keys) else []

    def may_be_met(self, key: str) -> bool:
        """Return whether the condition may be met after a key was set.

        Args:
            key: one of the keys.
        """
        self.missing.discard(key)
        return not self.every or not self.missing


@final
class Peer:
    """A connection of an authenticated process, which never blocks the server.

    Args:
        channel: the connection.

    Attributes:
        at_end: name of a sequence and a value, which is appended when the connection ends.
        wait: request that is not answered yet.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self.number = channel, channel.fileno()
        os.set_blocking(self.number, False)
        self.at_end: tuple[str, bytes] | None = None
        self.wait: Wait | None = None
        self._received, self._unsent = bytearray(), bytearray()

    @property
    def sending(self) -> bool:
        """Return whether a part of an answer is not sent yet."""
        return bool(self._unsent)

    def receive(self) -> None:
        """Read the bytes that the process has sent.

        Raises:
            EOFError: the process has closed the connection.
            OSError: the connection was lost.
        """
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.number, _READ)
            if not data:
                raise EOFError
            self._received += data
            if len(self._received) > authentication.LARGEST + _READ:
                raise OSError("too many bytes without a message")

    def message(self) -> bytes | None:
        """Return the next message that was received as a whole; None without a whole message.

        Raises:
            AuthenticationError: it is not the next message of the process.
            OSError: it is larger than `LARGEST`.
        """
        begin, received = 4, self._received
        if len(received) < begin:
            return None
        (size,) = struct.unpack_from("!i", received)
        if size == _LARGE:
            begin = 12
            if len(received) < begin:
                return None
            (size,) = struct.unpack_from("!Q", received, 4)
        if size < 0 or size > authentication.LARGEST:
            raise OSError("bad message length")
        if len(received) < begin + size:
            return None
        message = bytes(received[begin : begin + size])
        del received[: begin + size]
        return self.channel.verified(message) if isinstance(self.channel, SignedConnection) else message

    def answer(self, data: bytes) -> None:
        """Send an answer, as far as the process reads it; `send` continues.

        Args:
            data: content.

        Raises:
            OSError: the connection was lost.
        """
        if isinstance(self.channel, SignedConnection):
            data = self.channel.signed(data)
        length = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", _LARGE, len(data))
        self._unsent += length + data
        self.send()

    def send(self) -> None:
        """Send more of the answer.

        Raises:
            OSError: the connection was lost.
        """
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: os.write(self.number, self._unsent)]


def reached(value: bytes | None, least: int | None) -> bool:
    """Return whether a value exists and, with `least`, is a number of at least `least`.

    Args:
        value: a value of the store; None if the key does not exist.
        least: the least number; None for any value.
    """
    if value is None or least is None:
        return value is not None
    with contextlib.suppress(ValueError):
        return int(value) >= least
    return False


def end(channel: Channel) -> None:
    """Close a connection, also if a forked process has a copy of it.

    Args:
        channel: the connection.
    """
    shut(channel.fileno())
    channel.close()


def shut(number: int) -> None:
    """Shut down a connection, which wakes a thread that waits for it.

    Args:
        number: file descriptor of the socket.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
