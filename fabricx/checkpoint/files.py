"""Files of a checkpoint: a folder with a manifest, valid if its marker file exists; or a single file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from fabricx.checkpoint import archive
from fabricx.checkpoint.storage import Place, as_path, discard, is_local
from fabricx.distributed.messages import plain_data
from fabricx.errors import CheckpointError, MissingCheckpoint

FORMAT: Final = 3  # written only if there are objects, whose places earlier versions would take for dicts
_WITHOUT_OBJECTS: Final = 2
MANIFEST: Final = "manifest.json"
MARKER: Final = "COMMITTED"
STATE: Final = "state.pt"
INDEX: Final = "index.json"
OBJECTS: Final = "objects.pt"  # a pickle, which is read with permission only; absent without objects
SHARDS: Final = "rank-*.safetensors"
BLOCK: Final = 1 << 22  # bytes that are read, written and checksummed at a time
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)  # no separator, no drive, no leading dot
_LARGEST: Final = {MARKER: 1 << 10, MANIFEST: 1 << 28}  # maximum bytes; no checksum covers these files when read


def folder_to_write(path: Path, *, hidden: bool = False) -> Path:
    """Return the working folder of a checkpoint: a hidden folder beside `path`, to be renamed when complete.

    In an object store, where renaming means copying, it is `path` itself if nothing exists at `path`.

    Args:
        path: path of the checkpoint.
        hidden: it is always beside `path`.
    """
    if not hidden and not is_local(path) and not path.exists():
        return path
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def serialized(rest: Any) -> bytes:
    """Serialise the part of a state that is not tensors.

    Args:
        rest: plain data.

    Raises:
        CheckpointError: the state contains objects other than plain data, whose loading would run code.
    """
    try:
        return plain_data.dumps(rest)
    except TypeError as error:
        raise CheckpointError(
            "the checkpoint contains an object that is neither a tensor nor plain data, and reading it would run "
            f"code: {error}\n  return only numbers, text, lists, dicts and tensors from state_dict() and "
            "on_save_checkpoint"
        ) from None


def deserialized(data: bytes, file: Path) -> Any:
    """Deserialise the bytes of `serialized`; they are never executed.

    Args:
        data: content of the file.
        file: its path, for the message.

    Raises:
        CheckpointError: the file contains more than tensors and plain data, or is not in this format.
    """
    try:
        return plain_data.loads(data)
    except ValueError as error:
        raise CheckpointError(
            f"{file} was refused, and nothing in it was executed: {error}\n  fabricx writes tensors and plain data "
            "only, so this file was altered or comes from another program; load a checkpoint from a source that you "
            "trust. To pass on weights alone, write them as safetensors: fabricx checkpoint export"
        ) from None


def complete(
    work: Path, rest: bytes, index: Mapping[str, Any], manifest: Mapping[str, Any], files: Mapping[str, Any],
    objects: bytes = b"",
) -> None:  # fmt: skip
    """Write all remaining files of a checkpoint to its working folder, the marker last.

    Args:
        work: working folder, which contains the shards of all ranks.
        rest: result of `serialized`.
        index: index of the tensors.
        manifest: information for users; format, versions, sizes and checksums are added.
        files: size and checksum of each shard, by file name.
        objects: result of `objects.pickled`; empty without objects.
    """
    small = {STATE: rest, INDEX: json.dumps(index).encode(), **({OBJECTS: objects} if objects else {})}
    listed = {**files, **{name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in small.items()}}
    manifest = {**manifest, "format": FORMAT} if objects else manifest
    written = (json.dumps({**dated(manifest), "files": listed}, indent=2) + "\n").encode()
    for name, data in {**small, MANIFEST: written}.items():
        _write(work / name, data)
    _write(work / MARKER, _mark(written).encode())
    _sync(work)


def dated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with format, time and versions.

    Args:
        manifest: information for users.
    """
    now = datetime.now(UTC).isoformat()
    return {"format": _WITHOUT_OBJECTS, **manifest, "written": now, "versions": _versions()}


def put_in_place(work: Path, path: Path) -> None:
    """Rename a complete working folder or file to `path`.

    An existing checkpoint at `path` is replaced; after a crash at any time, either the old or the new checkpoint
    exists.

    Args:
        work: beside `path`; a folder is the result of `folder_to_write`.
        path: path of the checkpoint.
    """
    if work == path:
        return
    if work.is_file() and not path.is_dir():
        os.replace(work, path)
        _sync(path.parent)
        return
    aside = None
    if path.exists() or path.is_symlink():  # rename it to another valid name first, and delete it afterwards
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


def read_manifest(path: Place) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        path: path of the checkpoint.

    Raises:
        MissingCheckpoint: there is no such file or folder.
        CheckpointError: the checkpoint is incomplete, has a newer format, or names files outside of its folder.
    """
    path = as_path(path)
    if not is_committed(path):
        if not path.exists():
            raise MissingCheckpoint(f"there is no checkpoint {path}")
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MARKER}, which is written last")
    if path.is_file():
        return _of_this_format(path, archive.read_record(path))
    damaged = CheckpointError(f"{path / MANIFEST} is damaged: its checksum isn't that of {MARKER}")
    try:
        data, wanted = _small(path, MANIFEST), _small(path, MARKER)
        manifest: dict[str, Any] = json.loads(data)
        manifest = {**manifest, "format": int(manifest["format"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise damaged from None
    if wanted != _mark(data).encode():
        raise damaged
    _check_files(path, _of_this_format(path, manifest).get("files"))
    return manifest


def _of_this_format(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    if (version := manifest["format"]) > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, and this version of fabricx reads formats up to {FORMAT}; update fabricx"
        )
    return manifest


def _small(path: Path, name: str) -> bytes:
    """Read a file that no checksum covers; pipes, which would block, and large sparse files are refused."""
    file = member(path, name)
    if not file.is_file() or file.stat().st_size > _LARGEST[name]:
        raise OSError(f"{file} is not a file of the expected kind and size")
    return file.read_bytes()


def member(path: Path, name: object) -> Path:
    """Return the path of a file of a checkpoint, whose name may be untrusted.

    Args:
        path: folder of the checkpoint.
        name: file name, as read from the checkpoint.

    Raises:
        CheckpointError: the name leads out of the folder, or the file is a symbolic link.
    """
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{path} refers to the file {name!r}, which is not a plain name in its folder, and nothing outside of a "
            "checkpoint is read. The checkpoint was altered, or was not written by fabricx: do not load it"
        )
    file = path / name
    if file.is_symlink():
        raise CheckpointError(
            f"{file} is a symbolic link, and nothing outside of a checkpoint is read. If the checkpoint is yours, "
            "copy its folder with the files that links point to (cp -rL), and load the copy"
        )
    return file


def _check_files(path: Path, files: Any) -> None:
    """Validate the manifest's list of files before any of them is opened."""
    if not isinstance(files, dict) or not {STATE, INDEX} <= files.keys():
        raise CheckpointError(
            f"{path / MANIFEST} is damaged: it does not list {STATE} and {INDEX} with their checksums"
        )
    for name, listed in files.items():
        member(path, name)
        numbers = [listed.get("bytes"), listed.get("crc32")] if isinstance(listed, dict) else [None]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise CheckpointError(f"{path / MANIFEST} is damaged: {name} has no size and checksum there")


def _mark(manifest: bytes) -> str:
    """Return the content of the marker: the checksum of the manifest, which contains the checksums of all files."""
    return f"{MANIFEST} crc32 {zlib.crc32(manifest)}\n"


def verify(path: Place) -> dict[str, Any]:
    """Read all files of a checkpoint and compare sizes and checksums with the manifest; returns the manifest.

    Args:
        path: folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or a file is damaged; the message names the file.
    """
    path = as_path(path)
    manifest = read_manifest(path)
    if path.is_file():
        archive.check_records(path)
        return manifest
    for name, listed in manifest["files"].items():
        check_size(path, name, listed)
        if _crc32(path / name) != listed["crc32"]:
            raise _damaged(path / name)
    return manifest


def check_size(path: Path, name: str, listed: Mapping[str, int]) -> None:
    """Check that a file exists with the size in the manifest.

    Args:
        path: folder of the checkpoint.
        name: name of the file.
        listed: the file's entry in the manifest.

    Raises:
        CheckpointError: the file is missing, or has another size.
    """
    file = member(path, name)
    if not file.is_file() or file.stat().st_size != listed["bytes"]:
        raise _damaged(file)


def read_listed(path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Return the content of a file, verified against the manifest.

    Args:
        path: folder of the checkpoint.
        name: name of the file.
        manifest: manifest of the checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    listed = manifest["files"][name]
    check_size(path, name, listed)
    data = (path / name).read_bytes()
    if len(data) != listed["bytes"] or zlib.crc32(data) != listed["crc32"]:
        raise _damaged(path / name)
    return data


def _damaged(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: its size or checksum isn't what the manifest says")


def is_committed(path: Place) -> bool:
    """Return whether a complete checkpoint exists at a path.

    Args:
        path: folder of the checkpoint.
    """
    path = as_path(path)
    complete = (path / MARKER).is_file() or archive.is_single_file(path)
    return complete and not path.name.endswith(".partial")


def list_committed(folder: Place) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first.

    Args:
        folder: is not searched recursively.
    """
    folder = as_path(folder)
    if not folder.is_dir():
        return []
    return oldest_first([path for path in folder.iterdir() if not path.is_symlink() and is_committed(path)])


def oldest_first(checkpoints: list[Path]) -> list[Path]:
    """Sort checkpoints by time; checkpoints that a run has deleted meanwhile are omitted.

    Args:
        checkpoints: folders of complete checkpoints.
    """
    dated = []
    for path in checkpoints:
        with contextlib.suppress(FileNotFoundError):
            dated.append((written(path), path.name, path))
    return [path for _, _, path in sorted(dated, key=lambda entry: entry[:2])]


def written(path: Path) -> datetime:
    """Return when a checkpoint was completed.

    Args:
        path: folder of the checkpoint.

    Raises:
        FileNotFoundError: the checkpoint does not exist any more.
    """
    try:
        return datetime.fromisoformat(read_manifest(path)["written"])
    except (CheckpointError, KeyError, ValueError, TypeError):  # a damaged checkpoint is sorted by its marker's time
        return datetime.fromtimestamp((path if path.is_file() else path / MARKER).stat().st_mtime, UTC)


def sweep(folder: Place) -> None:
    """Delete incomplete checkpoints of a killed run in a folder.

    Args:
        folder: folder with checkpoints.
    """
    folder = as_path(folder)
    unfinished = list(folder.glob(".*.partial"))
    if not is_local(folder) and folder.is_dir():
        unfinished += [path for path in folder.iterdir() if any(path.glob(SHARDS)) and not is_committed(path)]
    for path in unfinished:
        discard(path)


def remove(path: Place) -> None:
    """Delete a checkpoint. What is left by a process that is killed meanwhile is not valid, and `sweep` deletes it.

    Args:
        path: folder of the checkpoint.
    """
    path = as_path(path)
    if not path.is_file() and not is_local(path):
        (path / MARKER).unlink(missing_ok=True)
    elif path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path = path.rename(folder_to_write(path, hidden=True))
    discard(path)


def _versions() -> dict[str, str]:
    try:
        version = metadata.version("fabricx")
    except metadata.PackageNotFoundError:
        version = "from source"
    return {"fabricx": version, "torch": torch.__version__, "python": sys.version.split()[0]}


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
