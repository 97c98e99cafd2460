"""Aggregate the records of all ranks in a thread of the launching process, for the console and TensorBoard."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from fabricx.errors import is_full
from fabricx.redaction import printable
from fabricx.telemetry import logs
from fabricx.telemetry.diagnosis import diagnose
from fabricx.telemetry.events import EventFile, interval_s
from fabricx.telemetry.reader import Files, Record
from fabricx.telemetry.run import Run
from fabricx.telemetry.tensorboard import Board
from fabricx.telemetry.trace import write_trace

READ_INTERVAL_S: Final = 2.0
_NICE: Final = 10  # added to the niceness of the thread
_MIN_STEPS: Final = 100  # steps before the duration of steps is diagnosed


@final
class Aggregator:
    """Read a run's records in a thread until `close`; repeat warnings on the console, and write for TensorBoard.

    Args:
        run_dir: the run's folder.
        board: write scalars for TensorBoard.
        separate: this process does not train; the thread yields the processor to processes that do.
    """

    def __init__(self, run_dir: Path, *, board: bool, separate: bool = False) -> None:
        self.run_dir, self.run, self._separate = run_dir, Run(), separate
        self._files = Files(run_dir)
        self._file = EventFile(run_dir, "launcher")
        self._board = Board(run_dir, self.run) if board else None
        self._full = False
        self._warned: dict[str, set[int]] = defaultdict(set)  # ranks by warning
        self._warnings: dict[str, int] = defaultdict(int)
        self._began = time.time()
        self._logs_seen = 0  # log lines that were checked for warnings
        self._file.write("launched")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fabricx-watcher", daemon=True)
        self._thread.start()

    def record_event(self, name: str, text: str, **numbers: float) -> None:
        """Record an event that no rank can record, such as the death of a worker.

        Args:
            name: kind of event.
            text: description for users.
            **numbers: further values.
        """
        self._file.write("event", name=name, text=text, step=self.run.steps, **numbers)

    def close(self, ending: str) -> None:
        """Process the remaining records, write merged logs and the trace, and print a diagnosis.

        Args:
            ending: how the run ended.
        """
        self._closed.set()
        self._thread.join()
        self._file.write("closed", ending=ending)
        self._file.close()
        self._read_new()
        with self._tolerating_full_disk():
            if self._board is not None:
                self._board.close()
            logs.merge(self.run_dir, self.run.logs, self.run.more_logs)
            write_trace(self.run_dir)
        self._advise()
        for text, ranks in self._warned.items():
            if 0 not in ranks and self._warnings[text] > 1:
                line = f"rank {_names(ranks)} ({self._warnings[text]} times): {text}"
                print(printable(line), file=sys.stderr, flush=True)

    def _advise(self) -> None:
        """Print the diagnosis of a slow rank or of slow data loading."""
        diagnosis = diagnose(self.run)
        if self.run.steps >= _MIN_STEPS and ("waiting for data" in diagnosis or "is slow in" in diagnosis):
            command = shlex.join(["fabricx", "report", os.path.relpath(self.run_dir)])
            print(f"{diagnosis}\nfor details: {command}", file=sys.stderr, flush=True)

    def _run(self) -> None:
        if self._separate:
            with contextlib.suppress(OSError, AttributeError):  # systems without priorities of threads
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        records = self._files.new()
        earlier = [record for record in records if record.get("at", 0.0) < self._began]
        self.run.feed(earlier)  # records of an earlier attempt, which displayed them
        self._logs_seen = len(self.run.logs)
        if self._board is not None:
            self._board.skip()
        self.run.feed(records[len(earlier) :])  # records are sorted by time
        while not self._closed.wait(max(READ_INTERVAL_S, interval_s(self.run.size))):
            self._read_new()
            with self._tolerating_full_disk():
                if self._board is not None:
                    self._board.write()

    @contextlib.contextmanager
    def _tolerating_full_disk(self) -> Iterator[None]:
        """Ignore a full disk: skip the output, and print a message once."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            if not self._full:
                print("the disk is full: telemetry is not written until space is free", file=sys.stderr, flush=True)
            self._full = True

    def _read_new(self) -> None:
        self.run.feed(self._files.new())
        self._repeat_warnings(self.run.logs[self._logs_seen :])
        self._logs_seen = len(self.run.logs)

    def _repeat_warnings(self, lines: list[Record]) -> None:
        """Print warnings of ranks without a console, each once, unless the main rank logs the same warning."""
        new: dict[str, Any] = {}
        for line in lines:
            if line["level"] in ("WARNING", "ERROR", "CRITICAL") and "rank" in line:
                text = f"{line['level']} {line['name']}: {line['text']}"
                if text not in self._warned:
                    new[text] = line["rank"]
                self._warned[text].add(line["rank"])
                self._warnings[text] += 1
        for text, rank in new.items():
            if 0 not in self._warned[text]:
                print(printable(f"rank {rank}: {text}"), file=sys.stderr, flush=True)


def _names(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
