"""A checkpoint exists when it is complete, and only then."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from fabricx import checkpoint
from fabricx.errors import CheckpointError

STATE = {"weights": torch.arange(4.0), "epoch": 3, "names": ["a"]}


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {"step": 7})
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["weights"], STATE["weights"])
    assert loaded["epoch"] == 3
    assert checkpoint.list_committed(tmp_path) == [path]


def test_without_its_marker_it_is_neither_listed_nor_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {})
    (path / checkpoint.MARKER).unlink()
    assert checkpoint.list_committed(tmp_path) == []
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("file", ["state.pt", "index.json", "manifest.json", "COMMITTED", "rank-00000.safetensors"])
def test_one_flipped_bit_in_any_file_is_found(tmp_path: Path, file: str) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {})
    content = bytearray((path / file).read_bytes())
    for place in range(0, len(content), max(1, len(content) // 40)):
        content[place] ^= 1
        (path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(path)
        content[place] ^= 1


def test_a_failed_write_leaves_the_earlier_one_and_no_rest(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {"step": 1})
    with pytest.raises(CheckpointError, match="neither a tensor nor plain data"):
        checkpoint.save(tmp_path / "one", {"bad": Path("x")}, {"step": 2})
    assert checkpoint.load(path)["epoch"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


def test_writing_to_the_same_place_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", STATE, {})
    checkpoint.save(tmp_path / "one", {**STATE, "epoch": 4}, {})
    assert checkpoint.load(tmp_path / "one")["epoch"] == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


def test_a_newer_format_is_refused_and_said_so(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {})
    data = (path / checkpoint.MANIFEST).read_bytes().replace(b'"format": 2', b'"format": 99')
    (path / checkpoint.MANIFEST).write_bytes(data)
    (path / checkpoint.MARKER).write_text(f"manifest.json crc32 {zlib.crc32(data)}\n")
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(path)


def test_a_failure_between_two_renames_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path / "one", STATE, {})
    rename = Path.rename

    def breaks(self: Path, target: Path) -> Path:
        if target == path:
            raise OSError(5, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", breaks)
    with pytest.raises(CheckpointError, match="broken"):
        checkpoint.save(path, {**STATE, "epoch": 4}, {})
    checkpoint.sweep(tmp_path)
    [left] = checkpoint.list_committed(tmp_path)
    assert checkpoint.load(left)["epoch"] == 3
