"""Location of a checkpoint: a local folder, or a URL."""

from __future__ import annotations

import importlib
import io
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from fabricx import checkpoint
from fabricx.checkpoint.storage import as_path, discard, is_local, local_copy, open_seekable


@pytest.fixture
def remote() -> Any:
    folder: Any = as_path(f"memory://{uuid.uuid4().hex}")
    folder.mkdir()
    return folder


def test_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    assert as_path(tmp_path) == as_path(f"file://{tmp_path}") == tmp_path
    assert is_local(as_path(f"file://{tmp_path}"))
    assert not is_local(as_path("memory://somewhere"))


@pytest.mark.parametrize("url", ["s4://bucket/last.ckpt", "nothing://x"])
def test_an_unsupported_scheme_is_an_error_with_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=url):
        as_path(url)


def test_a_file_of_a_web_server_without_ranges_can_be_read_at_any_position() -> None:
    class Stream(io.BytesIO):
        def seek(self, position: int, whence: int = 0) -> int:
            raise ValueError("Cannot seek streaming HTTP file")

    class Remote:
        def open(self, mode: str) -> Stream:
            return Stream(b"0123")

    with open_seekable(Remote()) as file:  # type: ignore[arg-type]
        file.seek(2)
        assert file.read() == b"23"


def test_a_remote_file_is_local_while_it_is_used(remote: Any) -> None:
    (remote / "weights").write_bytes(b"12")
    with local_copy(remote / "weights") as copied:
        assert is_local(copied)
        assert copied.read_bytes() == b"12"
    assert not copied.exists()
    assert (remote / "weights").read_bytes() == b"12"


def test_a_local_file_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"12")
    with local_copy(tmp_path / "weights") as used:
        assert used == tmp_path / "weights"
    assert used.exists()


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_folder_is_discarded_with_its_content_and_a_missing_one_is_no_error(
    where: str, remote: Any, tmp_path: Path
) -> None:
    folder = remote / "one" if where == "remote" else tmp_path / "one"
    folder.mkdir()
    (folder / "part").write_bytes(b"1")
    discard(folder)
    assert not folder.exists()
    discard(folder)


def test_a_storage_of_the_user_is_found_by_its_scheme_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Store(LocalFileSystem):  # type: ignore[misc]
        protocol = "ofuser"

    monkeypatch.setitem(
        importlib.import_module("fsspec.registry")._registry, "ofuser", Store
    )  # as fsspec.register_implementation does
    checkpoint_path = as_path(f"ofuser://{tmp_path}/first") / "a.ckpt"
    assert not is_local(checkpoint_path)
    checkpoint.save(checkpoint_path, {"epoch": 3}, {"step": 7})
    assert checkpoint.load(str(checkpoint_path)) == {"epoch": 3}
    assert [path.name for path in checkpoint.list_committed(checkpoint_path.parent)] == ["a.ckpt"]
    checkpoint.remove(checkpoint_path)
    assert not checkpoint_path.exists()
