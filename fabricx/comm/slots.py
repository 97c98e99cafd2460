"""What one worker alone knows, left where whoever takes its place finds it: a file in memory that outlives a kill."""

from __future__ import annotations

import mmap
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, Final, final

HEADER: Final = struct.Struct("<QI")  # bytes of the record, checksum
ROOM: Final = 1 << 16  # bytes of a record at first


@final
class Slot:
    """Keeps a worker's two newest records, each under a key; a record that is half written counts as none.

    Args:
        folder: of the run; gone when the supervisor has ended.
        worker: whose.
    """

    def __init__(self, folder: str, worker: int) -> None:
        self._path = _path(folder, worker)
        self._room = 0
        self._memory: mmap.mmap | None = None
        self._key: Any = None
        self._place = 0

    def write(self, key: Any, record: Any) -> None:
        """Keep a record in the place of the one of the same key, or of the older one."""
        data = pickle.dumps((key, record), pickle.HIGHEST_PROTOCOL)
        if HEADER.size + len(data) > self._room:
            self._grow(2 * (HEADER.size + len(data)))
        if key != self._key:
            self._key, self._place = key, 1 - self._place
        assert self._memory is not None
        begin = self._place * self._room
        HEADER.pack_into(self._memory, begin, 0, 0)
        self._memory[begin + HEADER.size : begin + HEADER.size + len(data)] = data
        HEADER.pack_into(self._memory, begin, len(data), zlib.crc32(data))

    def _grow(self, size: int) -> None:
        self._room = max(ROOM, size)
        with self._path.with_suffix(".new").open("wb+") as file:
            file.truncate(2 * self._room)
            self._memory = mmap.mmap(file.fileno(), 2 * self._room)
        self._path.with_suffix(".new").rename(self._path)


def read(folder: str, worker: int) -> list[tuple[Any, Any]]:
    """Return a worker's whole records, with their keys; none where it has left none."""
    try:
        content = _path(folder, worker).read_bytes()
    except OSError:
        return []
    found = []
    for begin in (0, len(content) // 2):
        length, checksum = HEADER.unpack_from(content, begin)
        data = content[begin + HEADER.size : begin + HEADER.size + length]
        if length and zlib.crc32(data) == checksum:
            found.append(pickle.loads(data))
    return found


def _path(folder: str, worker: int) -> Path:
    return Path(folder) / f"slot-{worker}"
