"""A logger's folder, and small files that are written atomically."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabricx.core.hparams import plain


@dataclass
class Place:
    """Where a logger was told to write; nothing is made before `make`.

    Args:
        save_dir: the folder; None for the run's own, in which name and version are left out unless given.
        name: a folder in it.
        version: a folder in that: text, or a number n for "version_n". With a `save_dir` and without a version, the
            next free number, so that two runs never share a folder.
    """

    save_dir: str | os.PathLike[str] | None = None
    name: str | None = None
    version: int | str | None = None

    def make(self, run_dir: Path) -> Path:
        """Return the folder, which exists then."""
        parent = Path(run_dir if self.save_dir is None else self.save_dir).expanduser() / (self.name or "")
        if self.version is not None:
            folder = parent / (f"version_{self.version}" if isinstance(self.version, int) else self.version)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        if self.save_dir is None:
            parent.mkdir(parents=True, exist_ok=True)
            return parent
        number = 0
        while True:
            try:
                (parent / f"version_{number}").mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return parent / f"version_{number}"


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    passing = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    passing.write_text(text)
    passing.replace(path)


def write_hyperparameters(folder: Path, params: Mapping[str, Any]) -> None:
    """Write hyperparameters as `hparams.json`, beside those that are there already."""
    path = folder / "hparams.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    replace_text(path, json.dumps({**known, **plain(params)}, indent=2) + "\n")


def drop_half_line(path: Path) -> None:
    """Cut off a last line that has no end: a kill, or a full disk, came in between."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2**20))  # no row is longer
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
