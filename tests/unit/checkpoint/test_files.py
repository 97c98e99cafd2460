"""A checkpoint exists when it is complete, and only then."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.checkpoint import files
from fabricx.checkpoint.command import main
from fabricx.checkpoint.files import oldest_first
from fabricx.checkpoint.storage import as_path, discard
from fabricx.errors import CheckpointError
from fabricx.testing import QUIET, TinyModule, tiny_loader


@pytest.fixture(params=["a folder", "a URL"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty folder, of this machine or behind a URL."""
    root = tmp_path if request.param == "a folder" else as_path(f"memory://{tmp_path.name}")
    yield root
    if root is not tmp_path:
        discard(root)


STATE = {"weights": torch.arange(4.0), "epoch": 3, "names": ["a"]}


def test_a_saved_state_is_loaded(folder: Path) -> None:
    path = checkpoint.save(folder / "one", STATE, {"step": 7})
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["weights"], STATE["weights"])
    assert loaded["epoch"] == 3
    assert checkpoint.read_manifest(str(path))["step"] == 7
    assert checkpoint.list_committed(folder) == [path]


def test_a_checkpoint_without_its_marker_is_neither_listed_nor_loaded(folder: Path) -> None:
    path = checkpoint.save(folder / "one", STATE, {})
    (path / checkpoint.MARKER).unlink()
    assert checkpoint.list_committed(folder) == []
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpoint.load(path)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*two"):
        checkpoint.load(folder / "two")


@pytest.mark.parametrize("file", ["state.pt", "index.json", "manifest.json", "COMMITTED", "rank-00000.safetensors"])
def test_a_flipped_bit_in_any_file_is_detected(folder: Path, file: str) -> None:
    path = checkpoint.save(folder / "one", STATE, {})
    content = bytearray((path / file).read_bytes())
    for at in range(0, len(content), max(1, len(content) // 40)):
        content[at] ^= 1
        (path / file).write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.load(path)
        content[at] ^= 1


def test_a_failed_write_keeps_the_earlier_checkpoint_and_leaves_no_files(folder: Path) -> None:
    path = checkpoint.save(folder / "one", STATE, {"step": 1})
    with pytest.raises(CheckpointError, match=r"can't be pickled: bad \(builtins.function\)|can't be pickled: bad"):
        checkpoint.save(folder / "one", {"bad": lambda: None}, {"step": 2})
    assert checkpoint.load(path)["epoch"] == 3
    assert [entry.name for entry in folder.iterdir()] == ["one"]


def test_writing_to_the_same_path_replaces_the_checkpoint(folder: Path) -> None:
    checkpoint.save(folder / "one", STATE, {})
    checkpoint.save(folder / "one", {**STATE, "epoch": 4}, {})
    assert checkpoint.load(folder / "one")["epoch"] == 4
    assert [entry.name for entry in folder.iterdir()] == ["one"]


@pytest.mark.parametrize("target", ["one", "absent"])
def test_a_checkpoint_replaces_a_link_and_leaves_its_target(tmp_path: Path, target: str) -> None:
    checkpoint.save(tmp_path / "one", STATE, {})
    (tmp_path / "last").symlink_to(target)
    checkpoint.save(tmp_path / "last", {**STATE, "epoch": 4}, {})
    assert [checkpoint.load(tmp_path / name)["epoch"] for name in ("one", "last")] == [3, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "one"]


def test_a_newer_format_is_refused_with_its_version(folder: Path) -> None:
    path = checkpoint.save(folder / "one", STATE, {})
    data = (path / checkpoint.MANIFEST).read_bytes().replace(b'"format": 2', b'"format": 99')
    (path / checkpoint.MANIFEST).write_bytes(data)
    (path / checkpoint.MARKER).write_text(f"manifest.json crc32 {zlib.crc32(data)}\n")
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(path)


def test_a_failure_between_two_renames_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_only_files_of_a_killed_run_are_removed(folder: Path) -> None:
    whole = checkpoint.save(folder / "whole", STATE, {})
    killed = checkpoint.save(folder / "killed", STATE, {})
    (killed / checkpoint.MARKER).unlink()
    if isinstance(folder, Path):
        killed.rename(killed.with_name(".killed.0123.partial"))
    (folder / "notes").mkdir()
    (folder / "notes" / "mine").write_text("mine")
    checkpoint.sweep(folder)
    assert {entry.name for entry in folder.iterdir()} == {"whole", "notes"}
    checkpoint.verify(whole)


def test_a_deletion_that_is_killed_halfway_is_completed_by_a_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (checkpoint.save(folder / name, STATE, {}) for name in ("old", "new"))
    with monkeypatch.context() as patched:
        patched.setattr(files, "discard", lambda path: None)
        checkpoint.remove(old)
    assert checkpoint.list_committed(folder) == [new]
    checkpoint.sweep(folder)
    assert [entry.name for entry in folder.iterdir()] == ["new"]


def test_checkpoints_are_listed_by_the_time_of_writing_even_if_copied(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        checkpoint.save(tmp_path / "from" / name, STATE, {})
    for name in ("c", "b", "a"):
        shutil.copytree(tmp_path / "from" / name, tmp_path / "to" / name, copy_function=shutil.copyfile)
    (tmp_path / "to" / "c" / checkpoint.MANIFEST).write_text("{")  # is sorted by the marker's modification time
    assert [path.name for path in checkpoint.list_committed(tmp_path / "to")] == ["b", "a", "c"]


def test_a_checkpoint_that_is_deleted_during_listing_is_omitted(tmp_path: Path) -> None:
    kept = checkpoint.save(tmp_path / "kept", STATE, {})
    assert oldest_first([kept, tmp_path / "gone"]) == [kept]


@pytest.mark.parametrize(("url", "reason"), [("nowhere://a/b", "nowhere"), ("s3://a/b", "s3fs")])
def test_an_unsupported_checkpoint_url_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelCheckpoint(url)


def test_a_run_saves_to_a_url_and_resumes_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{tmp_path.name}"

    def train(steps: int, path: str | None) -> TinyModule:
        saver = ModelCheckpoint(url, every_n_train_steps=2, save_top_k=2, save_last=True)
        module = TinyModule()
        options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
        fx.Trainer(max_steps=steps, callbacks=[saver], **options).fit(module, tiny_loader(shuffle=True), ckpt_path=path)
        return module

    torch.manual_seed(0)
    whole = train(12, None)
    assert [path.name for path in checkpoint.list_committed(url)] == ["epoch=2-step=10.ckpt", "epoch=2-step=12.ckpt"]
    for path in checkpoint.list_committed(url):
        checkpoint.remove(path)
    torch.manual_seed(0)
    train(7, None)
    resumed = train(12, "last")
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    again = TinyModule.load_from_checkpoint(f"{url}/epoch=2-step=12.ckpt")
    assert torch.equal(again.layer.weight, whole.layer.weight)
    assert main(["verify", url]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["export", f"{url}/epoch=2-step=12.ckpt", str(tmp_path / "weights.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["layer.weight"], whole.layer.weight)
