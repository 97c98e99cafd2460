"""Paths, links and steps of the checkpoints that `ModelCheckpoint` keeps."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from fabricx.checkpoint import is_committed, read_manifest, remove
from fabricx.checkpoint.storage import as_path


def step_of(path: str) -> int:
    """Return the step of a checkpoint; -1 if there is none at this path."""
    if not is_committed(path):
        return -1
    step: int = read_manifest(as_path(path))["step"]
    return step


def remove_own(folder: str | None, path: str) -> None:
    """Delete a checkpoint in a folder. Paths may come from a checkpoint's state: nothing else is deleted."""
    if _is_in(folder, path) and not as_path(path).is_symlink() and is_committed(path):
        remove(path)


def may_be_looked_at(folder: str | None, path: object) -> bool:
    """Return whether a path from a checkpoint's state is in a folder or on this machine: no other URL is asked."""
    return isinstance(path, str) and ("://" not in path or _is_in(folder, path))


def _is_in(folder: str | None, path: str) -> bool:
    own = str(folder).rstrip("/")  # as text: to make a path of a URL may be a request already
    return folder is not None and path.startswith(f"{own}/") and ".." not in path.split("/")


def versioned(folder: Path, name: str, extension: str, may_replace: Callable[[Path], bool]) -> str:
    """Return the path of a name; with "-v1", "-v2", ... behind it, where the name is taken."""
    version = 0
    while True:
        path = folder / f"{name}{f'-v{version}' if version else ''}{extension}"
        if not (path.exists() or path.is_symlink()) or may_replace(path):
            return str(path)
        version += 1


def link_to(link: Path, target: Path) -> None:
    """Make a link, or let it point elsewhere, in one step that either happens or doesn't."""
    passing = link.with_name(f".{link.name}-{uuid.uuid4().hex[:8]}")
    passing.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
    os.replace(passing, link)
