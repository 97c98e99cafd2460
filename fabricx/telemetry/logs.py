"""Redirect Python's logs and warnings of each rank to a file and to its records; the main rank also prints them."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from fabricx import by_value
from fabricx.redaction import masked_values, records_masked
from fabricx.telemetry.events import EventFile

FOLDER: Final = "logs"  # subfolder of the run's folder
MERGED: Final = "all.log"  # file with the lines of all ranks
_PLAIN: Final = "%(levelname)s:%(name)s:%(message)s"


@dataclass
class LogSettings:
    """Log settings of the launching process, which workers copy.

    Attributes:
        level: level of the root logger.
        formatter: formatter of the first handler with a formatter, or None if it cannot be pickled.
    """

    level: int = logging.WARNING
    formatter: logging.Formatter | None = None

    @classmethod
    def of_this_process(cls) -> LogSettings:
        """Return the settings of this process."""
        root = logging.getLogger()
        formatter = next((handler.formatter for handler in root.handlers if handler.formatter is not None), None)
        try:
            by_value.dumps(formatter)
        except Exception:
            formatter = None
        return cls(root.level, formatter)


@final
class _ToFile(logging.Handler):
    """Write each line to a rank's records, and to a text file."""

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
        except Exception:  # a failed log line must not end the training
            self.handleError(record)

    def write(self, level: str, name: str, text: str) -> None:
        text = masked_values(text)
        self._records.write("log", level=level, name=name, text=text)
        with contextlib.suppress(OSError):  # ignore a full disk
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(_line(time.time(), None, level, name, text))


@contextlib.contextmanager
def logging_to(records: EventFile, number: int, settings: LogSettings | None) -> Iterator[None]:
    """Redirect log lines and warnings in the context to a rank's files.

    Args:
        records: record file of this process.
        number: rank of this process.
        settings: settings of the launching process; None in that process, where logging to the console is unchanged.
    """
    root, handler = logging.getLogger(), _ToFile(records, number)
    level, before, shown = root.level, list(root.handlers), warnings.showwarning
    prints = settings is None or number == 0
    added: list[logging.Handler] = [handler]
    if settings is not None:
        root.setLevel(settings.level)
    if not before and prints:  # Python's handler of last resort is inactive once the root logger has a handler
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.WARNING if settings is None else settings.level)
        console.setFormatter((settings and settings.formatter) or logging.Formatter(_PLAIN if settings else None))
        added.append(console)

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        handler.write("WARNING", category.__name__, f"{message} ({filename}:{lineno})")
        if prints:
            shown(message, category, filename, lineno, *rest, **more)

    for new in added:
        root.addHandler(new)
    warnings.showwarning = show  # type: ignore[assignment]
    try:
        with records_masked():
            yield
    finally:
        warnings.showwarning = shown
        root.setLevel(level)
        for new in added:
            root.removeHandler(new)
        handler.close()


def merge(run_dir: Path, logs: Sequence[Mapping[str, Any]], more: int = 0) -> None:
    """Write the log lines of all ranks to `logs/all.log`.

    Args:
        run_dir: the run's folder.
        logs: log records, in order of time.
        more: number of further lines, which are only in the files of the ranks.
    """
    if logs:
        lines = (_line(r["at"], r.get("rank"), r["level"], r["name"], r["text"]) for r in logs)
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        rest = f"({more} more lines are in the files of the ranks)\n" if more else ""
        (run_dir / FOLDER / MERGED).write_text("".join(lines) + rest)


def _line(at: float, rank: int | None, level: str, name: str, text: str) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    return f"{stamp} {'' if rank is None else f'rank {rank} '}{level} {name}: {text}\n"
