"""A rank's record of progress for its replacement, in a memory file that outlives the process."""

from __future__ import annotations

import mmap
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, Final, final

HEADER: Final = struct.Struct("<QQI")  # number of the record, counted from 1; bytes; checksum
PLACES: Final = 8  # a rank may write three in a step, and may be one step behind another that has died
ROOM: Final = 1 << 16  # bytes of a record at first


@final
class Slot:
    """Keeps a worker's newest records, each under a key; a record that is half written counts as none.

    Args:
        folder: of the run; gone when the supervisor has ended.
        worker: whose.
    """

    def __init__(self, folder: str, worker: int) -> None:
        self._path = _path(folder, worker)
        self._room = 0
        self._memory: mmap.mmap | None = None
        self._number = 0

    def write(self, key: Any, record: Any) -> None:
        """Keep a record in the place of the oldest."""
        data = pickle.dumps((key, record), pickle.HIGHEST_PROTOCOL)
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
            file.truncate(PLACES * self._room)
            self._memory = mmap.mmap(file.fileno(), PLACES * self._room)
        for number, data in kept:
            self._put(number, data)
        self._path.with_suffix(".new").rename(self._path)


def read(folder: str, worker: int) -> list[tuple[Any, Any]]:
    """Return a worker's whole records with their keys, newest first; none where it has left none."""
    try:
        content = _path(folder, worker).read_bytes()
    except OSError:
        return []
    return [pickle.loads(data) for _, data in _records(content)]


def _records(content: bytes) -> list[tuple[int, bytes]]:
    """Return the whole records of a file with their numbers, newest first."""
    found = []
    for begin in range(0, len(content), len(content) // PLACES):
        number, length, checksum = HEADER.unpack_from(content, begin)
        data = content[begin + HEADER.size : begin + HEADER.size + length]
        if length and zlib.crc32(data) == checksum:
            found.append((number, data))
    return sorted(found, reverse=True)


def _path(folder: str, worker: int) -> Path:
    return Path(folder) / f"slot-{worker}"
