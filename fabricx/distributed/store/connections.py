"""Connections of processes to the server of a run's store, and their messages."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import Final, final

from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.authentication import SignedConnection
from fabricx.distributed.store.state import Wait

Channel = Connection | SignedConnection
_READ: Final = 1 << 16  # bytes that are read at a time
_LARGE: Final = -1  # length of a message in `multiprocessing.connection` that stands before a length of 8 bytes


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

    def detect_loss_soon(self) -> None:
        """End this connection 6 s after the machine of the process has become unreachable, not after 30 s."""
        if isinstance(self.channel, SignedConnection):
            self.channel.detect_loss_soon()

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
