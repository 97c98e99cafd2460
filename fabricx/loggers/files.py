"""Folders of loggers, and atomic writing of small files."""

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
class LoggerFolder:
    """The configured folder of a logger; `make` creates it.

    Args:
        save_dir: parent folder; None for the run's folder, which gets subfolders only for explicit names and versions.
        name: subfolder of `save_dir`.
        version: subfolder of `name`: text, or a number n for "version_n". With a `save_dir` and without a version, the
            first unused number, so that two runs never share a folder.
    """

    save_dir: str | os.PathLike[str] | None = None
    name: str | None = None
    version: int | str | None = None

    def make(self, run_dir: Path) -> Path:
        """Create the folder and return its path.

        Args:
            run_dir: the run's folder.
        """
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
    """Write a file atomically.

    Args:
        path: path of the file, which may exist.
        text: new contents.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.write_text(text)
    temporary.replace(path)


def write_hyperparameters(folder: Path, params: Mapping[str, Any]) -> None:
    """Add hyperparameters to `hparams.json`.

    Args:
        folder: folder of the file.
        params: hyperparameters by name; they replace earlier values of the same name.
    """
    path = folder / "hparams.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    replace_text(path, json.dumps({**earlier, **plain(params)}, indent=2) + "\n")


def truncate_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a kill or a full disk may cause.

    Args:
        path: path of the file, which may not exist.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2**20))  # longer than any row
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
