"""Python's logs and warnings of a rank: to its own file and records; the console shows the main rank's."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from fabricx.redaction import masked_values, records_masked
from fabricx.telemetry.events import EventFile

FOLDER: Final = "logs"  # in the run's folder
MERGED: Final = "all.log"
_PLAIN: Final = "%(levelname)s:%(name)s:%(message)s"


@dataclass
class LogSettings:
    """How the launching process logs; workers do the same.

    Attributes:
        level: of the root logger.
        formatter: of its first handler, if that can travel.
    """

    level: int = logging.WARNING
    formatter: logging.Formatter | None = None

    @classmethod
    def of_this_process(cls) -> LogSettings:
        """Return those of this process."""
        root = logging.getLogger()
        formatter = next((handler.formatter for handler in root.handlers if handler.formatter is not None), None)
        try:
            pickle.dumps(formatter)
        except Exception:
            formatter = None
        return cls(root.level, formatter)


@final
class _ToFile(logging.Handler):
    """Writes each line to a rank's records, and to a file that people read."""

    def __init__(self, records: EventFile, number: int) -> None:
        super().__init__()
        self._records = records
        self._path = records.run_dir / FOLDER / f"rank-{number}.log"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            self.write(record.levelname, record.name, text)
        except Exception:  # whatever it is: a log line ends no training
            self.handleError(record)

    def write(self, level: str, name: str, text: str) -> None:
        text = masked_values(text)
        self._records.write("log", level=level, name=name, text=text)
        with contextlib.suppress(OSError):  # no room: it isn't worth the run
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(_line(time.time(), None, level, name, text))


@contextlib.contextmanager
def logging_to(records: EventFile, number: int, settings: LogSettings | None) -> Iterator[None]:
    """Let what is logged inside, and each warning, go to a rank's files.

    Args:
        records: of this process.
        number: its rank.
        settings: of the launching process; None if this is it, so that its console is left as it is.
    """
    root, handler = logging.getLogger(), _ToFile(records, number)
    level, before, shown = root.level, list(root.handlers), warnings.showwarning
    speaks = settings is None or number == 0
    added: list[logging.Handler] = [handler]
    if settings is not None:
        root.setLevel(settings.level)
    if not before and speaks:  # with any handler, Python would no longer show what nobody handles
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.WARNING if settings is None else settings.level)
        console.setFormatter((settings and settings.formatter) or logging.Formatter(_PLAIN if settings else None))
        added.append(console)

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        handler.write("WARNING", category.__name__, f"{message} ({filename}:{lineno})")
        if speaks:
            shown(message, category, filename, lineno, *rest, **more)

    for one in added:
        root.addHandler(one)
    warnings.showwarning = show  # type: ignore[assignment]
    try:
        with records_masked():
            yield
    finally:
        warnings.showwarning = shown
        root.setLevel(level)
        for one in added:
            root.removeHandler(one)
        handler.close()


def merge(run_dir: Path, logs: Sequence[Mapping[str, Any]], more: int = 0) -> None:
    """Write the lines of all ranks into one file, in the order of time; so many more are in the ranks' own only."""
    if logs:
        lines = (_line(r["at"], r.get("rank"), r["level"], r["name"], r["text"]) for r in logs)
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        rest = f"({more} more lines are in the ranks' own files)\n" if more else ""
        (run_dir / FOLDER / MERGED).write_text("".join(lines) + rest)


def _line(at: float, rank: int | None, level: str, name: str, text: str) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    return f"{stamp} {'' if rank is None else f'rank {rank} '}{level} {name}: {text}\n"
