"""A checkpoint is a folder with a manifest and a marker that is written last; without it, it doesn't exist."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import sys
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from fabricx.errors import CheckpointError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMMITTED"
STATE: Final = "state.pt"


def save(path: str | os.PathLike[str], state: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
    """Write a checkpoint beside `path` and rename it there once all of it is on disk.

    Whatever was at `path` stays until then; a crash at any moment leaves either the old or the new one.

    Args:
        path: the folder to be.
        state: tensors and plain data.
        manifest: what a person wants to know of it; versions, sizes and checksums are added.

    Raises:
        CheckpointError: something in the state is neither a tensor nor plain data, so that loading would run code.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    work.mkdir()
    try:
        torch.save(dict(state), work / STATE)
        _check_loads(work / STATE)
        listed = {STATE: {"bytes": (work / STATE).stat().st_size, "crc32": _crc32(work / STATE)}}
        whole = {"format": FORMAT, **manifest, "versions": _versions(), "files": listed}
        (work / MANIFEST).write_text(json.dumps(whole, indent=2) + "\n")
        for name in (STATE, MANIFEST):
            _sync(work / name)
        (work / MARKER).write_text("complete\n")
        _sync(work / MARKER)
        _sync(work)
        _put(work, path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return path


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint; nothing in the file is executed.

    Raises:
        CheckpointError: it isn't complete, is damaged, or was written by a newer format.
    """
    path = Path(path)
    if not is_committed(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER}")
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, this fabricx reads up to {FORMAT}; update fabricx"
        )
    for name, listed in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != listed["bytes"] or _crc32(file) != listed["crc32"]:
            raise CheckpointError(f"{file} is damaged: its size or checksum isn't what the manifest says")
    state: dict[str, Any] = torch.load(path / STATE, map_location=map_location, weights_only=True)
    return state


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a complete checkpoint at a path."""
    return (Path(path) / MARKER).is_file() and not Path(path).name.endswith(".partial")


def list_committed(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not Path(folder).is_dir():
        return []
    found = [path for path in Path(folder).iterdir() if not path.is_symlink() and is_committed(path)]
    return sorted(found, key=lambda path: ((path / MARKER).stat().st_mtime_ns, path.name))


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; the marker goes first, so that half a deletion is not taken for a checkpoint."""
    path = Path(path)
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _put(work: Path, path: Path) -> None:
    """Rename the finished folder into place; an older one is moved aside first and deleted afterwards."""
    aside = None
    if path.exists():
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        path.rename(aside)
    work.rename(path)
    _sync(path.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _check_loads(file: Path) -> None:
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("Please file an issue")[0].strip().splitlines()
        raise CheckpointError(
            "the checkpoint holds something that is neither a tensor nor plain data, so reading it would run code: "
            f"{reason[-1] if reason else error}\n  keep numbers, text, lists, dicts and tensors in state_dict() and "
            "on_save_checkpoint"
        ) from None


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("fabricx")
    except metadata.PackageNotFoundError:
        own = "from source"
    return {"fabricx": own, "torch": torch.__version__, "python": sys.version.split()[0]}


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
