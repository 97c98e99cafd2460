"""Record file of a process: append-only lines of JSON."""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, final

from fabricx.redaction import masked_values

FOLDER: Final = "telemetry"  # subfolder of the run's folder
_OPEN: weakref.WeakSet[EventFile] = weakref.WeakSet()
_IDENTITY: Final = "run"  # file in that folder with the run's id


class Span(StrEnum):
    """Categories of a rank's time. Waiting for other ranks is subtracted from the span in which it occurs."""

    DATA = "data"
    TRANSFER = "transfer"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    OPTIMIZER = "optimizer"
    PUSH = "push"
    PULL = "pull"
    CHECKPOINT = "checkpoint"
    VALIDATION = "validation"
    OTHER = "other"


def interval_s(ranks: int) -> float:
    """Return the seconds between two records of a rank, so that the records of all ranks cost few per cent of a core.

    Args:
        ranks: number of ranks.

    >>> interval_s(8), interval_s(10_000)
    (1.0, 20.0)
    """
    return max(1.0, ranks / 500)


def run_id(run_dir: Path) -> str:
    """Return the id of the run in a folder, equal for all processes and attempts of the run.

    The first process creates it: the launching process, or the main rank before other ranks start.

    Args:
        run_dir: the run's folder.
    """
    path = run_dir / FOLDER / _IDENTITY
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _unlock() -> None:
    """Replace the locks in a forked process: a thread that held a lock during the fork does not exist in it."""
    for file in _OPEN:
        file._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@final
class EventFile:
    """A file of records. Each record is a line, written by a single call, so that a kill truncates only the last line.

    On a full disk, records are dropped and the run continues; the number of dropped records is written as soon as
    space is available.

    Args:
        run_dir: the run's folder.
        who: name of the process: "worker 0", "server 1", "launcher".
        rank: rank of a worker, if assigned.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, run_dir: Path, who: str, rank: int | None = None) -> None:
        self.rank = rank
        self.run_dir, self._run = run_dir, run_id(run_dir)
        folder = run_dir / FOLDER
        name = f"{who.replace(' ', '')}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        _OPEN.add(self)
        self._lost, self._torn = 0, False
        self.size = 0  # bytes

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record.

        Args:
            kind: kind of the record; see the README.
            **fields: plain data; other values are converted to text.
        """
        if "text" in fields:
            fields["text"] = masked_values(str(fields["text"]))
        head = {"run": self._run, "kind": kind, "at": round(time.time(), 6), "mono": round(time.monotonic(), 6)}
        if self.rank is not None:
            head["rank"] = self.rank
        line = json.dumps({**head, **fields}, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            if self._file < 0:
                return
            if self._lost:
                line = json.dumps({**head, "kind": "lost", "records": self._lost}) + "\n" + line
            data = (("\n" if self._torn else "") + line).encode()
            try:
                written = os.write(self._file, data)
            except OSError:
                written = 0
            self.size += written
            self._torn = self._torn if not written else written < len(data)
            self._lost = self._lost + 1 if written < len(data) else 0

    def close(self) -> None:
        """Close the file; later records are ignored."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def finite(values: Mapping[str, float]) -> dict[str, float | str]:
    """Convert numbers for JSON: NaN and infinities become text ("nan", "inf", "-inf"), which `float` parses.

    Args:
        values: numbers by name.

    >>> finite({"loss": 0.5, "norm": float("inf")})
    {'loss': 0.5, 'norm': 'inf'}
    """
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
