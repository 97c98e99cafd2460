"""Paths, symbolic links and steps of the checkpoints that `ModelCheckpoint` keeps."""

from __future__ import annotations

import itertools
import os
import tempfile
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fabricx.checkpoint import is_committed, read_manifest, remove
from fabricx.checkpoint.storage import as_path
from fabricx.errors import CheckpointError, PossibleUserWarning, is_full


def check_writable(folder: Path) -> None:
    """Check that a file can be created in a folder, or in its nearest parent that exists; no file remains.

    Args:
        folder: local folder of checkpoints, which need not exist.

    Raises:
        ValueError: no file can be created in the folder.
    """
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        if is_full(error):  # space may be free at the time of the first checkpoint
            return
        raise ValueError(
            f"ModelCheckpoint: checkpoints cannot be written to {folder} ({error.strerror}); set dirpath, or "
            "default_root_dir of the Trainer, to a writable folder"
        ) from error


def warn_of_files(folder: Path) -> None:
    """Warn of files of other runs in a folder, where `ckpt_path="last"` may find checkpoints of these runs.

    Args:
        folder: local folder of checkpoints, which need not exist.
    """
    if folder.is_dir() and any(folder.iterdir()):
        text = f"the checkpoint folder {folder} exists and is not empty; its files are kept"
        warnings.warn(text, PossibleUserWarning, stacklevel=3)


def step_of(path: str) -> int:
    """Return the step of a checkpoint.

    Args:
        path: path or URL.

    Returns:
        the step; -1 if no complete checkpoint exists at the path.
    """
    if not is_committed(path):
        return -1
    step: int = read_manifest(as_path(path))["step"]
    return step


def is_of_run(path: Path, run: str, run_dir: Path | None, step: int | None = None) -> bool:
    """Return whether `path` is a complete checkpoint of a run and a step.

    Args:
        path: path of the checkpoint.
        run: id of the run, `RunState.run`.
        run_dir: folder of the run, which distinguishes it from a run that was resumed from it in a new folder.
        step: number of weight updates; None for any.
    """
    if run_dir is None or not is_committed(path):
        return False
    try:
        manifest = read_manifest(path)
    except CheckpointError:  # damaged
        return False
    return bool(manifest.get("run") == [run, run_dir.name] and step in (None, manifest["step"]))


def remove_own(folder: str | None, path: str) -> None:
    """Delete the checkpoint at `path` if it lies in `folder`; otherwise do nothing.

    Paths are read from checkpoints and thus untrusted, so that no other path is ever deleted.

    Args:
        folder: folder of the run's checkpoints; None deletes nothing.
        path: path or URL of the checkpoint. A symbolic link and an incomplete checkpoint are kept.
    """
    if _is_in(folder, path) and not as_path(path).is_symlink() and is_committed(path):
        remove(path)


def may_be_accessed(folder: str | None, path: object) -> bool:
    """Return whether an untrusted path, read from a checkpoint, may be accessed.

    Paths of this machine and paths in `folder` may be; a URL elsewhere may not, because access is a network request.

    Args:
        folder: folder of the run's checkpoints, or None.
        path: value read from the checkpoint; anything but text is refused.
    """
    return isinstance(path, str) and ("://" not in path or _is_in(folder, path))


def _is_in(folder: str | None, path: str) -> bool:
    prefix = str(folder).rstrip("/")  # compared as text: converting a URL to a path may send a request
    return folder is not None and path.startswith(f"{prefix}/") and ".." not in path.split("/")


@dataclass(frozen=True)
class Suffixes:
    """Ends of a checkpoint's name.

    Attributes:
        extension: extension with its dot.
        version: text before the number of a version.
        first: number of the second checkpoint of a name.
    """

    extension: str = ".ckpt"
    version: str = "-v"
    first: int = 1


def versioned(folder: Path, name: str, suffixes: Suffixes, may_replace: Callable[[Path], bool]) -> str:
    """Return an unused path for a checkpoint, with "-v1", "-v2", ... appended if the name exists already.

    Args:
        folder: folder of the checkpoint.
        name: file name without extension.
        suffixes: ends of the name.
        may_replace: returns whether an existing path may be overwritten.
    """
    for version in itertools.chain([""], (f"{suffixes.version}{n}" for n in itertools.count(suffixes.first))):
        path = folder / f"{name}{version}{suffixes.extension}"
        if not (path.exists() or path.is_symlink()) or may_replace(path):
            return str(path)
    raise AssertionError  # the versions do not end


def remove_link(folder: str | None, path: str) -> None:
    """Delete a link to a checkpoint if it lies in `folder`; otherwise do nothing.

    Args:
        folder: folder of the run's checkpoints; None deletes nothing.
        path: path of the link.
    """
    if _is_in(folder, path) and as_path(path).is_symlink():
        as_path(path).unlink()


def link_to(link: Path, target: Path) -> None:
    """Create or redirect a symbolic link atomically.

    Args:
        link: path of the link.
        target: path that it points to; stored relative to the link.
    """
    temporary = link.with_name(f".{link.name}-{uuid.uuid4().hex[:8]}")
    temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(temporary, link)
