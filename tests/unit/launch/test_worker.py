"""The file with a worker's result."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fabricx import by_value
from fabricx.launch import worker


def test_a_result_too_large_for_the_disk_names_the_folder_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    assert pickle.loads(Path(worker._write_result([1], tmp_path / "result-0")).read_bytes()) == [1]
    monkeypatch.setattr(by_value, "dump", full)
    with pytest.raises(OSError, match=rf"No space left.*doesn't fit into {tmp_path}; make room.*TMPDIR"):
        worker._write_result([1], tmp_path / "result-1")
    assert [path.name for path in tmp_path.iterdir()] == ["result-0"]
