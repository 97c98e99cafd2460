"""A rank's record of progress for its replacement, in a memory file that outlives the process."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import IO, Any, Final, final

from fabricx import by_value
from fabricx.errors import is_full

HEADER: Final = struct.Struct("<QQI")  # number of the record, counted from 1; bytes; checksum
PLACES: Final = 8  # records in the file: a rank may write 3 per step, and be a step behind a dead rank
ROOM: Final = 1 << 16  # initial bytes of a record


@final
class Slot:
    """Stores the newest records of a worker by key; an incomplete record is ignored.

    Args:
        folder: the run's folder; the supervisor deletes it at its end.
        worker: number of the worker.
    """

    def __init__(self, folder: str, worker: int) -> None:
        self._path = _path(folder, worker)
        self._room = 0
        self._memory: mmap.mmap | None = None
        self._number = 0

    def write(self, key: Any, record: Any) -> None:
        """Write a record over the oldest record.

        Args:
            key: key of the record.
            record: plain data and tensors.
        """
        data = by_value.dumps_for_peer((key, record))
        if HEADER.size + len(data) > self._room:
            self._grow(2 * (HEADER.size + len(data)))
        self._number += 1
        self._put(self._number, data)

    def _put(self, number: int, data: bytes) -> None:
        assert self._memory is not None
        begin = number % PLACES * self._room
        HEADER.pack_into(self._memory, begin, 0, 0, 0)
        self._memory[begin + HEADER.size : begin + HEADER.size + len(data)] = data
        HEADER.pack_into(self._memory, begin, number, len(data), zlib.crc32(data))

    def _grow(self, size: int) -> None:
        kept = [] if self._memory is None else _records(self._memory[:])
        self._room = max(ROOM, size)
        with self._path.with_suffix(".new").open("wb+") as file:
            allocate(file, PLACES * self._room)
            self._memory = mmap.mmap(file.fileno(), PLACES * self._room)
        for number, data in kept:
            self._put(number, data)
        self._path.with_suffix(".new").rename(self._path)


def allocate(file: IO[bytes], size: int) -> None:
    """Enlarge a file before it is mapped: a write to mapped memory without space on the disk would kill the process.

    Args:
        file: open for writing.
        size: bytes of the file.

    Raises:
        OSError: the disk is full; the message names the remedy.
    """
    file.truncate(size)
    if not hasattr(os, "posix_fallocate"):  # not on all systems
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if not is_full(error):
            raise
        folder = os.path.dirname(os.fspath(file.name))
        text = f"{error.strerror}: records for recovery need {size} bytes in {folder}"
        raise OSError(error.errno, f"{text}; make room there, or set TMPDIR to another folder") from None


def read(folder: str, worker: int) -> list[tuple[Any, Any]]:
    """Return the complete records of a worker as (key, record), newest first.

    Args:
        folder: the run's folder.
        worker: number of the worker.
    """
    try:
        content = _path(folder, worker).read_bytes()
    except OSError:
        return []
    return [pickle.loads(data) for _, data in _records(content)]


def _records(content: bytes) -> list[tuple[int, bytes]]:
    """Return the complete records of a file with their numbers, newest first."""
    records = []
    for begin in range(0, len(content), len(content) // PLACES):
        number, length, checksum = HEADER.unpack_from(content, begin)
        data = content[begin + HEADER.size : begin + HEADER.size + length]
        if length and zlib.crc32(data) == checksum:
            records.append((number, data))
    return sorted(records, reverse=True)


def _path(folder: str, worker: int) -> Path:
    return Path(folder) / f"slot-{worker}"
