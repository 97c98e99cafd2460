"""The launching process's thread: reads the records of all ranks, and writes summaries for people."""

from __future__ import annotations

import contextlib
import os
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
from fabricx.telemetry.diagnosis import verdict
from fabricx.telemetry.events import EventFile
from fabricx.telemetry.reader import Files, Record
from fabricx.telemetry.run import Run
from fabricx.telemetry.tensorboard import Board
from fabricx.telemetry.trace import write_trace

LOOK_S: Final = 2.0
_NICE: Final = 10
_MANY: Final = 100  # steps, before which nothing is said of how long they take


@final
class Aggregator:
    """Reads a run's records in a thread, until it is closed.

    Args:
        run_dir: the run's folder.
        board: write for TensorBoard.
        apart: this process doesn't train, and gives way to those that do.
    """

    def __init__(self, run_dir: Path, *, board: bool, apart: bool = False) -> None:
        self.run_dir, self.run, self._apart = run_dir, Run(), apart
        self._files = Files(run_dir)
        self._file = EventFile(run_dir, "launcher")
        self._board = Board(run_dir, self.run) if board else None
        self._full = False
        self._said: dict[str, set[int]] = defaultdict(set)  # which ranks have warned of what
        self._times: dict[str, int] = defaultdict(int)
        self._began = time.time()
        self._heard = 0  # lines of logs
        self._file.write("launched")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="fabricx-watcher", daemon=True)
        self._thread.start()

    def note(self, name: str, text: str, **numbers: float) -> None:
        """Write down that something has happened which no rank can tell."""
        self._file.write("event", name=name, text=text, step=self.run.steps, **numbers)

    def close(self, ending: str) -> None:
        """Read and write what is left."""
        self._over.set()
        self._thread.join()
        self._file.write("closed", ending=ending)
        self._file.close()
        self._look()
        with self._room_or_not():
            if self._board is not None:
                self._board.close()
            logs.merge(self.run_dir, self.run.logs, self.run.more_logs)
            write_trace(self.run_dir)
        self._advise()
        for text, ranks in self._said.items():
            if 0 not in ranks and self._times[text] > 1:
                told = f"rank {_names(ranks)} said {self._times[text]} times: {text}"
                print(printable(told), file=sys.stderr, flush=True)

    def _advise(self) -> None:
        """Say what would help, where much of a run's time is lost in one place."""
        judged = verdict(self.run)
        if self.run.steps >= _MANY and ("waiting for data" in judged or "is slow in" in judged):
            print(f"{judged}\nfor more: fabricx report {os.path.relpath(self.run_dir)}", file=sys.stderr, flush=True)

    def _look_on(self) -> None:
        if self._apart:
            with contextlib.suppress(OSError, AttributeError):  # a system where threads have no priority of their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        found = self._files.new()
        earlier = [record for record in found if record.get("at", 0.0) < self._began]
        self.run.feed(earlier)  # all that was said and shown in an earlier attempt
        self._heard = len(self.run.logs)
        if self._board is not None:
            self._board.skip()
        self.run.feed(found[len(earlier) :])  # they are sorted by time
        while not self._over.wait(LOOK_S):
            self._look()
            with self._room_or_not():
                if self._board is not None:
                    self._board.write()

    @contextlib.contextmanager
    def _room_or_not(self) -> Iterator[None]:
        """Let a disk that is full cost what would have been written, and not the run."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            if not self._full:
                print("the disk is full: what ranks record is not shown", file=sys.stderr, flush=True)
            self._full = True

    def _look(self) -> None:
        self.run.feed(self._files.new())
        self._repeat_warnings(self.run.logs[self._heard :])
        self._heard = len(self.run.logs)

    def _repeat_warnings(self, lines: list[Record]) -> None:
        """Show warnings of ranks that don't write to the console, each once, unless the main rank has the same."""
        told: dict[str, Any] = {}
        for line in lines:
            if line["level"] in ("WARNING", "ERROR", "CRITICAL") and "rank" in line:
                text = f"{line['level']} {line['name']}: {line['text']}"
                if text not in self._said:
                    told[text] = line["rank"]
                self._said[text].add(line["rank"])
                self._times[text] += 1
        for text, rank in told.items():
            if 0 not in self._said[text]:
                print(printable(f"rank {rank}: {text}"), file=sys.stderr, flush=True)


def _names(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
