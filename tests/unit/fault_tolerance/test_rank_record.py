"""The newest complete records of a rank outlive its process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fabricx.fault_tolerance.rank_record import HEADER, PLACES, ROOM, Slot, read


def test_a_worker_without_writes_has_no_records(tmp_path: Path) -> None:
    assert read(str(tmp_path), 0) == []
    Slot(str(tmp_path), 0)
    assert read(str(tmp_path), 0) == []


def test_the_newest_records_are_kept_newest_first(tmp_path: Path) -> None:
    slot, other = Slot(str(tmp_path), 3), Slot(str(tmp_path), 4)
    for number in range(PLACES + 3):
        slot.write((0, number), {"batch": number, "sum": torch.tensor(float(number))})
        other.write("of another worker", None)
        assert read(str(tmp_path), 3)[0][0] == (0, number)
    records = read(str(tmp_path), 3)
    assert [key for key, _ in records] == [(0, number) for number in range(PLACES + 2, 2, -1)]
    assert all(record["batch"] == key[1] == int(record["sum"]) for key, record in records)


def test_earlier_records_are_kept_when_a_larger_record_needs_space(tmp_path: Path) -> None:
    slot = Slot(str(tmp_path), 0)
    slot.write(1, "small")
    slot.write(2, bytes(4 * ROOM))
    slot.write(3, "small")
    assert [(key, len(record)) for key, record in read(str(tmp_path), 0)] == [(3, 5), (2, 4 * ROOM), (1, 5)]


@pytest.mark.parametrize("part", ["header", "content"])
def test_a_record_interrupted_by_a_death_is_ignored(tmp_path: Path, part: str) -> None:
    slot = Slot(str(tmp_path), 0)
    slot.write(1, "whole")
    slot.write(2, "torn")
    [path] = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    begin = 2 * len(content) // PLACES
    if part == "header":
        content[begin : begin + HEADER.size] = bytes(HEADER.size)  # as during a write
    else:
        content[begin + HEADER.size] ^= 1
    path.write_bytes(content)
    assert read(str(tmp_path), 0) == [(1, "whole")]


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slot(str(tmp_path), 0).write(1, "small")
    [path] = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= PLACES * ROOM

    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left.* bytes in {tmp_path}; make room there, or set TMPDIR"):
        Slot(str(tmp_path), 1).write(1, "small")
