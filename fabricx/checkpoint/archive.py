"""The record by which an archive of torch is a complete checkpoint of fabricx."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fabricx.checkpoint.storage import open_seekable
from fabricx.errors import CheckpointError

RECORD: Final = "fabricx.json"
OBJECTS: Final = "fabricx.objects.pt"
_LARGEST: Final = 1 << 28  # maximum bytes of the manifest


def is_single_file(path: Path) -> bool:
    """Return whether a path is a complete single-file checkpoint of fabricx.

    Args:
        path: any path.
    """
    if not path.is_file() or path.name.endswith(".partial"):
        return False
    try:
        with open_seekable(path) as file:
            if file.read(2) != b"PK":
                return False
            with zipfile.ZipFile(file) as archive:
                return _record(archive) is not None
    except (OSError, zipfile.BadZipFile):
        return False


def _record(archive: zipfile.ZipFile) -> zipfile.ZipInfo | None:
    records = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == RECORD]
    return records[0] if len(records) == 1 else None


def read_record(path: Path) -> dict[str, Any]:
    """Return the manifest of a single-file checkpoint.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        with open_seekable(path) as file, zipfile.ZipFile(file) as archive:
            record = _record(archive)
            if record is None or max(record.file_size, record.compress_size) > _LARGEST:
                raise ValueError(RECORD)
            manifest = json.loads(archive.read(record))
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile):
        raise CheckpointError(f"{path} is damaged: it has no readable {RECORD}") from None
    return {**manifest, "format": version, "files": {path.name: {"bytes": path.stat().st_size}}}


def check_records(path: Path) -> None:
    """Compare the checksums of all records of a single-file checkpoint.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with open_seekable(path) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} does not match its checksum")


def read_objects(path: Path) -> bytes:
    """Return the pickled objects of a single-file checkpoint, which may be untrusted; empty without objects.

    Args:
        path: path of the file.
    """
    with open_seekable(path) as file, zipfile.ZipFile(file) as archive:
        named = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == OBJECTS]
        if not named or named[0].file_size > path.stat().st_size:  # compressed, which fabricx never does
            return b""
        return archive.read(named[0])


def add_record(file: Path, manifest: Mapping[str, Any], objects: bytes = b"") -> None:
    """Add the manifest to an archive of torch.

    Args:
        file: local archive.
        manifest: plain data.
        objects: result of `objects.pickled`, also in the archive's own pickle, for a reader that verifies their bytes.
    """
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        if objects:
            archive.writestr(f"{folder}/{OBJECTS}", objects)
        archive.writestr(f"{folder}/{RECORD}", json.dumps(manifest, indent=2))
