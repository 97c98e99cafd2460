"""A checkpoint is a folder with a manifest and a marker that is written last; without it, it doesn't exist."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import secrets
import sys
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from fabricx.checkpoint.places import Place, as_path, discard, is_local
from fabricx.errors import CheckpointError

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMMITTED"
STATE: Final = "state.pt"
INDEX: Final = "index.json"
SHARDS: Final = "rank-*.safetensors"
BLOCK: Final = 1 << 22  # bytes that are read, written and summed at a time


def folder_to_write(path: Path) -> Path:
    """Return the folder that is written to until a checkpoint is complete: beside `path`, to be renamed.

    Where renaming means copying, as in an object store, it is `path` itself, if nothing is there yet.
    """
    if not is_local(path) and not path.exists():
        return path
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def serialized(rest: Any) -> bytes:
    """Return what of a state isn't tensors, as it goes to disk.

    Raises:
        CheckpointError: something in it is not plain data, so that loading would run code.
    """
    stream = io.BytesIO()
    torch.save(rest, stream)
    stream.seek(0)
    try:
        torch.load(stream, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("Please file an issue")[0].strip().splitlines()
        raise CheckpointError(
            "the checkpoint holds something that is neither a tensor nor plain data, so reading it would run code: "
            f"{reason[-1] if reason else error}\n  keep numbers, text, lists, dicts and tensors in state_dict() and "
            "on_save_checkpoint"
        ) from None
    return stream.getvalue()


def commit(
    work: Path, path: Path, rest: bytes, index: Mapping[str, Any], manifest: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Complete a folder of shards, and rename it into place.

    Whatever was at `path` stays until then; a crash at any moment leaves either the old or the new one.

    Args:
        work: the folder, with all ranks' shards.
        path: the folder to be.
        rest: what `serialized` returned.
        index: of the tensors.
        manifest: what a person wants to know of it; format, versions, sizes and checksums are added.
        files: size and checksum of each shard, by name.
    """
    small = {STATE: rest, INDEX: json.dumps(index).encode()}
    listed = {**files, **{name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in small.items()}}
    now = datetime.now(UTC).isoformat()
    whole = {"format": FORMAT, **manifest, "written": now, "versions": _versions(), "files": listed}
    written = (json.dumps(whole, indent=2) + "\n").encode()
    for name, data in {**small, MANIFEST: written}.items():
        _write(work / name, data)
    _write(work / MARKER, _mark(written).encode())
    _sync(work)
    if work == path:
        return
    aside = None
    if path.exists():  # moved out of the way first, under a name that still counts, and deleted afterwards
        aside = path.with_name(f"{path.name}.before-{secrets.token_hex(4)}")
        _move(path, aside)
    _move(work, path)
    _sync(path.parent)
    if aside is not None:
        remove(aside)


def _move(folder: Path, to: Path) -> None:
    if is_local(folder):
        folder.rename(to)
        return
    store: Any = folder
    for file in sorted(folder.iterdir(), key=lambda file: file.name == MARKER):
        store.fs.copy(file.path, (to / file.name).path)  # type: ignore[attr-defined]
    remove(folder)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself.

    Raises:
        CheckpointError: it isn't complete, or was written by a newer format.
    """
    if not is_committed(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER}")
    damaged = CheckpointError(f"{path / MANIFEST} is damaged: it isn't what {MARKER} says")
    try:
        data = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(data)
        found = int(manifest["format"])
        wanted = (path / MARKER).read_text()
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged from None
    if wanted != _mark(data):
        raise damaged
    if found > FORMAT:
        raise CheckpointError(f"{path} has format {found}, this fabricx reads up to {FORMAT}; update fabricx")
    return manifest


def _mark(manifest: bytes) -> str:
    """Return what the marker holds: the manifest's checksum, as the manifest holds those of all files."""
    return f"{MANIFEST} crc32 {zlib.crc32(manifest)}\n"


def verify(path: Place) -> None:
    """Read all files of a checkpoint, and compare sizes and checksums with the manifest.

    Raises:
        CheckpointError: it isn't complete, or a file is damaged; the message names it.
    """
    path = as_path(path)
    for name, listed in read_manifest(path)["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != listed["bytes"] or _crc32(file) != listed["crc32"]:
            raise CheckpointError(f"{file} is damaged: its size or checksum isn't what the manifest says")


def is_committed(path: Place) -> bool:
    """Return whether there is a complete checkpoint at a path."""
    path = as_path(path)
    return (path / MARKER).is_file() and not path.name.endswith(".partial")


def list_committed(folder: Place) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    folder = as_path(folder)
    if not folder.is_dir():
        return []
    return oldest_first([path for path in folder.iterdir() if not path.is_symlink() and is_committed(path)])


def oldest_first(checkpoints: list[Path]) -> list[Path]:
    """Return those of the checkpoints that are still there (a run may be deleting some), sorted."""
    placed = []
    for path in checkpoints:
        with contextlib.suppress(FileNotFoundError):
            placed.append((written(path), path.name, path))
    return [path for _, _, path in sorted(placed, key=lambda entry: entry[:2])]


def written(path: Path) -> datetime:
    """Return when a checkpoint was completed.

    Raises:
        FileNotFoundError: it isn't there any more.
    """
    try:
        return datetime.fromisoformat(read_manifest(path)["written"])
    except (CheckpointError, KeyError, ValueError, TypeError):  # damaged: it still has its place among the others
        return datetime.fromtimestamp((path / MARKER).stat().st_mtime, UTC)


def sweep(folder: Place) -> None:
    """Delete what a run that was killed has left unfinished in a folder."""
    folder = as_path(folder)
    unfinished = list(folder.glob(".*.partial"))
    if not is_local(folder) and folder.is_dir():
        unfinished += [path for path in folder.iterdir() if any(path.glob(SHARDS)) and not is_committed(path)]
    for path in unfinished:
        discard(path)


def remove(path: Place) -> None:
    """Delete a checkpoint; the marker goes first, so that half a deletion is not taken for a checkpoint."""
    path = as_path(path)
    (path / MARKER).unlink(missing_ok=True)
    discard(path)


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("fabricx")
    except metadata.PackageNotFoundError:
        own = "from source"
    return {"fabricx": own, "torch": torch.__version__, "python": sys.version.split()[0]}


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        if is_local(path):
            file.flush()
            os.fsync(file.fileno())


def _sync(path: Path) -> None:
    if not is_local(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
