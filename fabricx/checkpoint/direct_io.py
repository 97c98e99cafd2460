"""Direct I/O: writes to a disk that bypass the system's page cache.

A checkpoint is rarely read soon. Cached, it takes memory from the dataset, and copying to the cache takes CPU time from
training: four times as long as direct writes, thirty times if memory has to be reclaimed first.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from fabricx.checkpoint.files import BLOCK

if sys.platform == "linux":
    import fcntl

    _PAST_THE_CACHE: Final = os.O_DIRECT
else:
    _PAST_THE_CACHE: Final = 0


@final
class DirectFile:
    """A new file on a local disk, opened for appending; its bytes are on the disk after it is closed without an error.

    Args:
        path: path of the file; an existing file is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._block = mmap.mmap(-1, BLOCK)  # direct I/O requires aligned memory and whole blocks
        self._filled = 0
        self._set_direct(bool(_PAST_THE_CACHE))

    def write(self, data: memoryview) -> None:
        """Append bytes.

        Args:
            data: any length.
        """
        while data:
            count = min(len(data), BLOCK - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == BLOCK:
                self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._set_direct(False)  # the last bytes don't fill a block of the disk
                self._flush()
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def _flush(self) -> None:
        with memoryview(self._block)[: self._filled] as block:
            written = 0
            while written < self._filled:
                try:
                    written += os.write(self._file, block[written:])
                except OSError as error:
                    if not self._direct or error.errno != errno.EINVAL:
                        raise
                    self._set_direct(False)  # the disk does not support it, or requires larger blocks
        self._filled = 0

    def _set_direct(self, wanted: bool) -> None:
        self._direct = False
        if _PAST_THE_CACHE:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            try:
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _PAST_THE_CACHE if wanted else flags & ~_PAST_THE_CACHE)
                self._direct = wanted
            except OSError:  # a file system without direct I/O, such as tmpfs
                return
