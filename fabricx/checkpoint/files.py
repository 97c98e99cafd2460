"""A checkpoint is a folder with a manifest and a marker that is written last; without it, it doesn't exist."""

from __future__ import annotations

import io
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

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMMITTED"
STATE: Final = "state.pt"
INDEX: Final = "index.json"
BLOCK: Final = 1 << 22  # bytes that are read, written and summed at a time


def partial_folder(path: Path) -> Path:
    """Return the folder beside `path` that is written to until it is complete."""
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
    whole = {"format": FORMAT, **manifest, "versions": _versions(), "files": listed}
    written = (json.dumps(whole, indent=2) + "\n").encode()
    for name, data in {**small, MANIFEST: written}.items():
        _write(work / name, data)
    _write(work / MARKER, _mark(written).encode())
    _sync(work)
    aside = None
    if path.exists():  # moved out of the way first, under a name that still counts, and deleted afterwards
        aside = path.with_name(f"{path.name}.before-{secrets.token_hex(4)}")
        path.rename(aside)
    work.rename(path)
    _sync(path.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


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


def verify(path: str | os.PathLike[str]) -> None:
    """Read all files of a checkpoint, and compare sizes and checksums with the manifest.

    Raises:
        CheckpointError: it isn't complete, or a file is damaged; the message names it.
    """
    path = Path(path)
    for name, listed in read_manifest(path)["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != listed["bytes"] or _crc32(file) != listed["crc32"]:
            raise CheckpointError(f"{file} is damaged: its size or checksum isn't what the manifest says")


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a complete checkpoint at a path."""
    return (Path(path) / MARKER).is_file() and not Path(path).name.endswith(".partial")


def list_committed(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not Path(folder).is_dir():
        return []
    found = [path for path in Path(folder).iterdir() if not path.is_symlink() and is_committed(path)]
    return sorted(found, key=lambda path: ((path / MARKER).stat().st_mtime_ns, path.name))


def sweep(folder: str | os.PathLike[str]) -> None:
    """Delete what a run that was killed has left unfinished in a folder."""
    for path in Path(folder).glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; the marker goes first, so that half a deletion is not taken for a checkpoint."""
    path = Path(path)
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


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
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
