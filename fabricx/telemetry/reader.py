"""Reads the records of a run while its processes still write them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from fabricx.errors import FabricxError
from fabricx.telemetry.events import FOLDER

Record = dict[str, Any]
_FOR_EVER: Final = 1e11  # seconds; what is later is no time
_MANY: Final = 1 << 53
_RANKS: Final = 1 << 20


class NotARun(FabricxError):
    """A folder in which no run has recorded anything."""


def opened(path: Path) -> BinaryIO:
    """Open a file of a run, whose folder may be another user's: a link could lead to a private file of the reader's.

    Raises:
        OSError: it is a link or no file, isn't there, or is in a folder to which another user's link leads.
    """
    if is_foreign_link(path.parent):
        raise PermissionError(f"{path.parent} is a link of another user's")
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is no file")
    return open(number, "rb")


def is_foreign_link(path: Path) -> bool:
    """Return whether a path is a link that another user has made."""
    found = path.lstat()
    return stat.S_ISLNK(found.st_mode) and hasattr(os, "geteuid") and found.st_uid not in (0, os.geteuid())


@final
class Tail:
    """What is new in a file of records. A last line that isn't complete waits; one that isn't a record is counted.

    Attributes:
        broken: lines that couldn't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.broken = path, 0
        self._read = 0  # bytes
        self._half = b""

    def new(self) -> list[Record]:
        """Return the records that have come since the last call."""
        try:
            if os.path.getsize(self.path) <= self._read:
                return []
            with opened(self.path) as file:
                file.seek(self._read)
                data = file.read()
        except OSError:  # somebody has taken it away
            return []
        self._read += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        return [record for line in lines if line and (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> Record | None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not _is_record(found):
            self.broken += 1
            return None
        return {**found, "who": self.path.name.split("-")[0], "file": self.path.name}

    @property
    def is_half(self) -> bool:
        """Return whether the last line has no end."""
        return bool(self._half)


def _is_record(found: Record) -> bool:
    """Return whether the fields that all records share are what they should be."""
    numbers = [found.get(name, 0) for name in ("at", "mono", "since", "clock_offset_s")]
    counts = [found.get(name, 0) for name in ("step", "size", "records", "each")]
    rank = found.get("rank")
    return (
        isinstance(found.get("kind"), str)
        and all(type(number) in (int, float) and abs(number) < _FOR_EVER for number in numbers)
        and all(type(count) is int and abs(count) < _MANY for count in counts)
        and (rank is None or (type(rank) is int and 0 <= rank < _RANKS))
    )


@final
class Files:
    """All files of records of a run; more may come.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._tails: dict[str, Tail] = {}

    def new(self) -> list[Record]:
        """Return the records that have come since the last call, sorted by time on the main rank's clock."""
        names = (entry.name for entry in os.scandir(self.folder)) if self.folder.is_dir() else ()
        for name in sorted(name for name in names if name.endswith(".jsonl")):
            if name not in self._tails:
                self._tails[name] = Tail(self.folder / name)
        found = [record for tail in self._tails.values() for record in tail.new()]
        return sorted(found, key=lambda record: record.get("at", 0.0))

    def complaints(self) -> list[str]:
        """Return what couldn't be read, in words."""
        found = []
        for name, tail in self._tails.items():
            if tail.broken:
                lines = f"{tail.broken} lines aren't records" if tail.broken > 1 else "a line isn't a record"
                found.append(f"{name}: {lines}; all others are shown")
            if tail.is_half:
                found.append(f"{name}: the last line has no end; its process was writing it, or was killed meanwhile")
        return found


def check_run(run_dir: Path) -> None:
    """Raise an error that says what to do if no run has recorded anything in a folder."""
    if not run_dir.is_dir():
        raise NotARun(f"{run_dir} isn't there: give the folder of a run, such as runs/2026-01-31_12-00-00-abcdef")
    if any((run_dir / FOLDER).glob("*.jsonl")):
        return
    runs = sorted(path.parent for path in run_dir.glob(f"*/{FOLDER}"))
    inside = f"; it has runs in it, such as {runs[-1]}" if runs else ""
    raise NotARun(
        f"{run_dir} has no records of a run ({FOLDER}/*.jsonl){inside}. A run writes them if it has a logger or writes "
        "checkpoints, and enable_telemetry isn't off"
    )
