"""Journal of a server's messages since its newest snapshot, in memory that outlives the process."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx import by_value
from fabricx.distributed.compression.codecs import make_codec
from fabricx.parameter_server.server.handlers import HANDLERS
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import Push, ServerInit
from fabricx.parameter_server.wire.partition import merge_spans

HEADER: Final = struct.Struct("<QQQ")  # of a record: number of its snapshot, bytes of the event, bytes of the vector
ROOM: Final = 1 << 20  # minimum bytes of records before a new snapshot
COPIES: Final = 4  # for large models: the same limit, as a multiple of the weights


@final
class Journal:
    """Two files: a snapshot followed by records, and a file for the next snapshot.

    A record is written before the server processes its message, and is valid when its header is written. A server that
    replays the journal is therefore at least as far as all replies that it had sent; workers send later messages again
    (see `request_channel.Channel`).

    Args:
        paths: paths of both files, which are created if they do not exist.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in paths]
        self._number = 0  # number of the newest snapshot; 0 for none
        self._begin = self._end = 0  # byte range of the records after it
        self._version = 0  # version of the server in the newest snapshot

    def close(self) -> None:
        """Close the files without changing them."""
        for file in self._files:
            os.close(file)
        self._files = []

    # -- recording ----------------------------------------------------------------------------------------------------

    def record_message(self, server: Server, worker: int, number: int, message: Any, inbox: Tensor) -> None:
        """Record a message that is about to be processed, with its part of the vector.

        Args:
            server: server that processes the message.
            worker: number of the sender.
            number: number of the message.
            message: a worker's message.
            inbox: vector of the worker.
        """
        if self._number and HANDLERS[type(message)].journaled(message):
            spans = _carried(server.init, message)
            raw = inbox.view(torch.uint8).numpy().data
            self._write(("message", worker, number, message, spans), [raw[start:stop] for start, stop in spans])

    def record_joined(self, worker: int, *, resumes: bool) -> None:
        """Record that a worker is about to join.

        Args:
            worker: number of the worker.
            resumes: see `Server.add_worker`.
        """
        if self._number:
            self._write(("joined", worker, resumes), [])

    def record_left(self, worker: int) -> None:
        """Record that a worker is about to leave.

        Args:
            worker: number of the worker.
        """
        if self._number:
            self._write(("left", worker), [])

    def snapshot_if_due(self, server: Server, message: Any) -> None:
        """Take a snapshot at the beginning, and when replaying all records would take long.

        Args:
            server: server to save.
            message: message that was just processed.
        """
        every = server.snapshot_every
        if not every:
            return
        room = max(ROOM, COPIES * server.values.nbytes)
        late = server.version >= self._version + every or self._end - self._begin > room
        if isinstance(message, ServerInit) or not self._number or late:
            self._take(server)

    def _take(self, server: Server) -> None:
        file = self._files[(self._number + 1) % 2]
        os.ftruncate(file, 0)
        target: Any = _At(file, HEADER.size)
        torch.save(server.snapshot(), target)
        os.pwrite(file, HEADER.pack(self._number + 1, target.end - HEADER.size, 0), 0)
        before, self._number = self._number, self._number + 1
        self._begin = self._end = target.end
        self._version = server.version
        if before:
            os.ftruncate(self._files[before % 2], 0)

    def _write(self, event: tuple[Any, ...], vector: Sequence[memoryview]) -> None:
        target = _At(self._files[self._number % 2], self._end + HEADER.size)
        size = target.write(by_value.dumps(event))
        carried = sum(target.write(part) for part in vector)
        os.pwrite(target.file, HEADER.pack(self._number, size, carried), self._end)
        self._end = target.end

    # -- replay -------------------------------------------------------------------------------------------------------

    def replay(self, server: Server) -> bool:
        """Restore a new server from the snapshot and the records; returns whether there was a snapshot.

        Args:
            server: new; changed in place.
        """
        numbers = [self._header(file, 0)[0] for file in self._files]
        self._number = max(numbers)
        if not self._number:
            return False
        file = self._files[self._number % 2]
        _, size, _ = self._header(file, 0)
        self._begin = self._end = HEADER.size + size
        # Safe to unpickle: the memory was written by this server's predecessor and is private to this run's processes.
        server.restore(torch.load(io.BytesIO(_read(file, HEADER.size, size)), weights_only=False))
        self._version = server.version
        shard, dtype = server.init.shard, server.init.dtype
        inbox, outbox = torch.zeros(shard.room, dtype=dtype), torch.zeros(shard.room, dtype=dtype)
        while (header := self._header(file, self._end))[0] == self._number:
            _, size, carried = header
            begin = self._end + HEADER.size
            event = pickle.loads(_read(file, begin, size))
            _replay_event(server, event, _read(file, begin + size, carried), inbox, outbox)
            self._end = begin + size + carried
        os.ftruncate(file, self._end)  # the rest of an incomplete record, which a shorter record would not overwrite
        return True

    @staticmethod
    def _header(file: int, offset: int) -> tuple[int, int, int]:
        data = os.pread(file, HEADER.size, offset)
        number, size, carried = HEADER.unpack(data.ljust(HEADER.size, b"\0"))
        return number, size, carried


def _replay_event(server: Server, event: tuple[Any, ...], carried: bytes, inbox: Tensor, outbox: Tensor) -> None:
    kind, worker, *rest = event
    if kind == "joined":
        server.add_worker(worker, resumes=rest[0])
    elif kind == "left":
        server.remove_worker(worker)
    else:
        number, message, spans = rest
        raw, offset = inbox.view(torch.uint8).numpy(), 0
        for start, stop in spans:
            raw[start:stop] = memoryview(carried)[offset : offset + stop - start]
            offset += stop - start
        server.handle_once(worker, number, message, inbox, outbox)


def _carried(init: ServerInit, message: Any) -> list[tuple[int, int]]:
    """Return the byte ranges of a worker's vector that belong to a message."""
    if not isinstance(message, Push) or message.empty:
        return []
    shard, size, settings = init.shard, init.dtype.itemsize, init.settings
    dense = len(shard.pieces)
    if settings.compression is not None:
        spans = [(0, make_codec(settings.compression, keep=settings.keep).bytes(shard.dense))]
    else:
        rooms = [room for number, room in enumerate(shard.rooms[:dense]) if number not in message.missing]
        spans = [(start * size, stop * size) for start, stop in merge_spans(rooms)]
    for number, count in message.rows.items():
        start = shard.rooms[dense + number][0]
        spans.append((start * size, (start + count * (1 + shard.rows[number].width)) * size))
    return spans


class _At:
    """Sequential writer at a position of a file, for `torch.save`."""

    def __init__(self, file: int, begin: int) -> None:
        self.file, self.end = file, begin

    def write(self, data: bytes | memoryview) -> int:
        """Write all bytes; returns their number.

        Args:
            data: contiguous.
        """
        remaining = memoryview(data).cast("B")
        size = remaining.nbytes
        while remaining:
            written = os.pwrite(self.file, remaining, self.end)
            self.end += written
            remaining = remaining[written:]
        return size

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""


def _read(file: int, begin: int, size: int) -> bytes:
    parts = []
    while size and (part := os.pread(file, size, begin)):
        parts.append(part)
        begin, size = begin + len(part), size - len(part)
    return b"".join(parts)
