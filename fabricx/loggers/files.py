"""Folders of loggers, and atomic writing of small files."""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fabricx.core.hparams import plain
from fabricx.core.logger import Logger

LAUNCHED: Final = ("RANK", "SLURM_PROCID")  # variables of torchrun and SLURM


@dataclass
class LoggerFolder:
    """The configured folder of a logger; `make` creates it.

    Args:
        save_dir: parent folder; None for the run's folder, which gets subfolders only for explicit names and versions.
        name: subfolder of `save_dir`.
        version: subfolder of `name`: text, or a number n for "version_n". With a `save_dir` and without a version, the
            first unused number, so that two runs never share a folder. All runs with the same logger have its folder.
        sub_dir: subfolder below the version.

    Attributes:
        path: the folder; None before it is created.
    """

    save_dir: str | os.PathLike[str] | None = None
    name: str | None = None
    version: int | str | None = None
    sub_dir: str | os.PathLike[str] | None = None
    path: Path | None = field(default=None, init=False)

    def make(self, run_dir: Path | None) -> Path:
        """Create the folder and return its path.

        Args:
            run_dir: the run's folder; None with a `save_dir`.
        """
        root = run_dir if self.save_dir is None else self.save_dir
        assert root is not None
        parent = self._parent(root)
        if self.version is None and self.save_dir is not None:
            self.version = _first_unused(parent)
        self.path = self._below(parent)
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path

    def before_run(self) -> Path | None:
        """Return the folder, and create it if it does not depend on the run; None if it is not known yet.

        Under a launcher it is not created, because all ranks have to choose the same version.
        """
        if self.path is not None or self.save_dir is None:
            return self.path
        if not any(name in os.environ for name in LAUNCHED):
            return self.make(None)
        parent = self._parent(self.save_dir)
        if self.version is None:
            self.version = next(n for n in itertools.count() if not (parent / f"version_{n}").exists())
        return self._below(parent)

    def _parent(self, root: str | os.PathLike[str]) -> Path:
        return Path(root).expanduser() / (self.name or "")

    def _below(self, parent: Path) -> Path:
        version = f"version_{self.version}" if isinstance(self.version, int) else self.version
        return parent / (version or "") / (self.sub_dir or "")


class FolderLogger(Logger):
    """Names of the folder of a logger that writes files.

    Args:
        location: the configured folder.
    """

    def __init__(self, location: LoggerFolder) -> None:
        self._location = location
        self._waiting: dict[str, Any] = {}  # hyperparameters that were logged before the logger was open

    @property
    def name(self) -> str:
        return self._location.name or type(self).__name__.removesuffix("Logger").lower()

    @property
    def version(self) -> int | str | None:
        return self._location.version

    @property
    def log_dir(self) -> str | None:
        """Return the folder; with a `save_dir` it is created when it is read before a run. None otherwise."""
        path = self._location.before_run()
        return None if path is None else str(path)

    @property
    def root_dir(self) -> str | None:
        """Return the folder of all versions; None for the run's folder."""
        return None if self.save_dir is None else str(Path(self.save_dir) / (self._location.name or ""))

    @property
    def save_dir(self) -> str | None:
        """Return the parent folder; None for the run's folder."""
        given = self._location.save_dir
        return None if given is None else str(Path(given).expanduser())

    def for_caller(self) -> dict[str, Any]:
        return {"_location": self._location, "_waiting": {}}


def _first_unused(parent: Path) -> int:
    """Create the first unused folder version_0, version_1, ... and return its number."""
    number = 0
    while True:
        try:
            (parent / f"version_{number}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return number


def prefixed(metrics: Mapping[str, float], prefix: str, join: str = "-") -> dict[str, float]:
    """Return metrics with a prefix before each name.

    >>> prefixed({"loss": 1.0}, "train")
    {'train-loss': 1.0}

    Args:
        metrics: by name.
        prefix: "" for none.
        join: between prefix and name.
    """
    return {f"{prefix}{join}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


def by_name(params: Any) -> dict[str, Any]:
    """Return hyperparameters by name.

    Args:
        params: a mapping, a namespace, or None.
    """
    return dict(params if isinstance(params, Mapping) else vars(params) if params is not None else {})


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
