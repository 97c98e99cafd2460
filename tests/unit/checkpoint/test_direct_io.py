"""Direct I/O writes all bytes, for any size and any capability of the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fabricx.checkpoint.direct_io import DirectFile
from fabricx.checkpoint.files import BLOCK


def written(path: Path, *sizes: int) -> bytes:
    data = os.urandom(sum(sizes))
    left = memoryview(data)
    with DirectFile(path) as file:
        for size in sizes:
            file.write(left[:size])
            left = left[size:]
    return data


@pytest.mark.parametrize("sizes", [(), (1,), (BLOCK,), (BLOCK - 1, 2), (3, 2 * BLOCK, 4097)])
def test_every_byte_is_written(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    assert written(tmp_path / "file", *sizes) == (tmp_path / "file").read_bytes()


def test_a_disk_that_refuses_direct_io_is_written_with_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_write, asked = os.write, []

    def refuse_once(file: int, data: memoryview) -> int:
        asked.append(len(data))
        if len(asked) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true_write(file, data[: len(data) // 2 or 1] if len(asked) == 2 else data)  # and a short write

    monkeypatch.setattr(os, "write", refuse_once)
    assert written(tmp_path / "file", BLOCK, BLOCK, 5) == (tmp_path / "file").read_bytes()
    assert asked == [BLOCK, BLOCK, BLOCK // 2, BLOCK, 5]


def test_a_full_disk_is_an_error_and_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "file", BLOCK)
    assert not before or len(os.listdir("/proc/self/fd")) == before
