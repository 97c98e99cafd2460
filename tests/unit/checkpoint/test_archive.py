"""An archive of torch is a checkpoint by its record; hostile records are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from fabricx.checkpoint.archive import add_record, check_records, is_single_file, read_objects, read_record
from fabricx.errors import CheckpointError


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_an_archive_with_a_record_is_a_checkpoint(archive: Path) -> None:
    assert not is_single_file(archive)
    add_record(archive, {"format": 2, "step": 5})
    assert is_single_file(archive)
    assert read_record(archive)["step"] == 5
    check_records(archive)
    assert torch.equal(torch.load(archive)["a"], torch.ones(3))


def test_objects_that_expand_when_read_are_refused(archive: Path) -> None:
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as changed:
        changed.writestr("a/fabricx.objects.pt", bytes(1 << 20))
    assert read_objects(archive) == b""


def test_other_files_and_files_with_two_records_are_no_checkpoints(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("PK, and no archive")
    assert not is_single_file(tmp_path / "text")
    assert not is_single_file(tmp_path)
    assert not is_single_file(tmp_path / "missing")
    add_record(archive, {"format": 2})
    with pytest.warns(UserWarning, match="Duplicate name"):
        add_record(archive, {"format": 2})
    assert not is_single_file(archive)


@pytest.mark.parametrize("record", ["no JSON", "[1]", "{}", '{"format": "x"}', "[" * 100_000])
def test_a_record_without_a_format_is_damaged(archive: Path, record: str) -> None:
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("a/fabricx.json", record)
    with pytest.raises(CheckpointError, match=r"a\.ckpt is damaged"):
        read_record(archive)
