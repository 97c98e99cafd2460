"""Read the records of a run, also while its processes write them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from fabricx.errors import FabricxError
from fabricx.telemetry.events import FOLDER

Record = dict[str, Any]
_MAX_S: Final = 1e11  # seconds; larger values are not valid times
_MAX_COUNT: Final = 1 << 53  # larger values are not valid counts
_MAX_RANK: Final = 1 << 20


class NotARun(FabricxError):
    """A folder without records of a run."""


def open_untrusted(path: Path) -> BinaryIO:
    """Open a file of a run for reading, without following links.

    The run's folder may belong to a different user, whose links could point to private files of the reader.

    Args:
        path: path of the file.

    Raises:
        OSError: the path does not exist, is a link or not a regular file, or its folder is a different user's link.
    """
    if is_foreign_link(path.parent):
        raise PermissionError(
            f"{path.parent} is a symbolic link that belongs to another user; pass the folder that it points to"
        )
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is not a regular file")
    return open(number, "rb")


def is_foreign_link(path: Path) -> bool:
    """Return whether a path is a link that belongs to a different user, other than root.

    Args:
        path: an existing path.
    """
    status = path.lstat()
    return stat.S_ISLNK(status.st_mode) and hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid())


@final
class Tail:
    """Read the new records of a file. An incomplete last line is kept for the next call; invalid lines are counted.

    Attributes:
        broken: number of lines that are not records.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.broken = path, 0
        self._read = 0  # bytes
        self._partial = b""

    def new(self) -> list[Record]:
        """Return the records that were written since the last call."""
        try:
            if os.path.getsize(self.path) <= self._read:
                return []
            with open_untrusted(self.path) as file:
                file.seek(self._read)
                data = file.read()
        except OSError:  # the file was deleted
            return []
        self._read += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [record for line in lines if line and (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> Record | None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not _is_record(fields):
            self.broken += 1
            return None
        return {**fields, "who": self.path.name.split("-")[0], "file": self.path.name}

    @property
    def is_truncated(self) -> bool:
        """Return whether the last line is incomplete."""
        return bool(self._partial)


def _is_record(fields: Record) -> bool:
    """Return whether the common fields of records have valid types and values."""
    numbers = [fields.get(name, 0) for name in ("at", "mono", "since", "clock_offset_s")]
    counts = [fields.get(name, 0) for name in ("step", "size", "records", "each")]
    rank = fields.get("rank")
    return (
        isinstance(fields.get("kind"), str)
        and all(type(number) in (int, float) and abs(number) < _MAX_S for number in numbers)
        and all(type(count) is int and abs(count) < _MAX_COUNT for count in counts)
        and (rank is None or (type(rank) is int and 0 <= rank < _MAX_RANK))
    )


@final
class Files:
    """Read the new records of all files of a run, including files that are created later.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._tails: dict[str, Tail] = {}

    def new(self) -> list[Record]:
        """Return the records that were written since the last call, sorted by the time `at`."""
        names = (entry.name for entry in os.scandir(self.folder)) if self.folder.is_dir() else ()
        for name in sorted(name for name in names if name.endswith(".jsonl")):
            if name not in self._tails:
                self._tails[name] = Tail(self.folder / name)
        records = [record for tail in self._tails.values() for record in tail.new()]
        return sorted(records, key=lambda record: record.get("at", 0.0))

    def complaints(self) -> list[str]:
        """Return a sentence for each problem of a file."""
        problems = []
        for name, tail in self._tails.items():
            if tail.broken:
                lines = f"{tail.broken} lines are not records" if tail.broken > 1 else "1 line is not a record"
                problems.append(f"{name}: {lines}; the other lines are shown")
            if tail.is_truncated:
                problems.append(f"{name}: the last line is incomplete; the process is writing it, or was killed")
        return problems


def check_run(run_dir: Path) -> None:
    """Check that a folder has records of a run.

    Args:
        run_dir: the run's folder.

    Raises:
        NotARun: the path is not a folder, or the folder has no records.
    """
    if not run_dir.is_dir():
        fault = "is a file" if run_dir.exists() else "does not exist"
        raise NotARun(f"{run_dir} {fault}: pass the folder of a run, such as runs/2026-01-31_12-00-00-abcdef")
    if any((run_dir / FOLDER).glob("*.jsonl")):
        return
    runs = sorted(path.parent for path in run_dir.glob(f"*/{FOLDER}"))
    inside = f"; it contains runs, such as {runs[-1]}" if runs else ""
    raise NotARun(
        f"{run_dir} has no records of a run ({FOLDER}/*.jsonl){inside}. A run writes records if it has a logger or "
        "writes checkpoints, and enable_telemetry is not False"
    )
