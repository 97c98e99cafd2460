"""Writes to all loggers of a run; a full disk loses rows and does not stop the run."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from fabricx.core.logger import Ending, Logger
from fabricx.errors import is_full
from fabricx.redaction import masked_values
from fabricx.telemetry.recorder import NoopRecorder

Event = tuple[str, str, int]  # name, text, step
Row = tuple[int, int, Mapping[str, float]]  # weight updates, step, values


@final
class LoggerDispatcher:
    """Distributes rows and texts to loggers and the recorder; on ranks that don't write, it has no loggers.

    Args:
        loggers: the run's loggers.
        run_dir: the run's folder; required with loggers.
        recorder: receives the same values.
        recovers: rows of the newest update may come again, since ranks can be replaced.

    Attributes:
        rewinds: how often rows of later steps were discarded.
    """

    def __init__(
        self, loggers: Sequence[Logger] = (), run_dir: Path | None = None, recorder: NoopRecorder | None = None, *,
        recovers: bool = False,
    ) -> None:  # fmt: skip
        self._recorder = recorder or NoopRecorder()
        self._loggers = list(loggers)
        self._run_dir = run_dir
        self._lost: dict[int, list[Event]] = {}  # loggers on a full disk, with events that they have not written yet
        self._recovers, self.rewinds = recovers, 0
        self._rows: list[Row] = []  # of the newest weight update
        self._again: list[Row] = []  # rows that are written and may come again
        for logger in self._loggers:
            logger.open(self._folder)

    @property
    def _folder(self) -> Path:
        assert self._run_dir is not None
        return self._run_dir

    def __bool__(self) -> bool:
        return bool(self._loggers) or self._recorder.on

    def each(self, write: Callable[[Logger], None]) -> None:
        """Call a function with each logger; a logger on a full disk is retried at the next call.

        Args:
            write: called with the logger.
        """
        for number in range(len(self._loggers)):
            self._attempt(number, write)

    def metrics(
        self, values: Mapping[str, float], step: int, axis: float | None = None, *, update: int | None = None
    ) -> None:  # fmt: skip
        """Write values that the module has logged.

        Args:
            values: values by name.
            step: number of the weight update, or of the evaluation batch.
            axis: step of the rows of loggers, if the module has logged a value named "step".
            update: number of the weight update; None if it is `step`.
        """
        position = step if axis is None or not math.isfinite(axis) else int(axis)
        row = (step if update is None else update, position, values)
        if self._again and self._is_written(row):
            return
        if self._recovers:
            if self._rows and self._rows[0][0] != row[0]:
                self._rows, self._again = [], []
            self._rows.append(row)
        self._write(values, position, row[0])
        self._recorder.metrics(values, step)

    def _is_written(self, row: Row) -> bool:
        """Return whether a row that may come again is such a row, which is expected once."""
        text = repr(row)  # NaN is not equal to itself
        position = next((number for number, other in enumerate(self._again) if repr(other) == text), None)
        if position is not None:
            del self._again[position]
        return position is not None

    def measured(self, values: Mapping[str, float], step: int) -> None:
        """Write measurements of the training itself.

        Args:
            values: values by name.
            step: number of the weight update.
        """
        self._write(values, step)
        self._recorder.gauges(values, step)

    def _write(self, values: Mapping[str, float], step: int, update: int | None = None) -> None:
        def write(logger: Logger) -> None:
            logger.updates_of_row = None if update == step else update
            try:
                logger.log_metrics(values, step)
            finally:
                logger.updates_of_row = None
            logger.after_row()

        self.each(write)

    def rewind(self, step: int) -> None:
        """Discard rows of later steps, because the run resumes from an earlier step.

        Args:
            step: number of the weight update.
        """
        self.rewinds += 1
        self.each(lambda logger: logger.rewind(step))
        self._recorder.rewind(step)
        self._rows, self._again = [], []

    def repeat(self) -> None:
        """Omit rows of the newest weight update that come again, because hooks that were interrupted are repeated."""
        self._again = list(self._rows)

    def event(self, name: str, text: str, step: int, **numbers: float) -> None:
        """Write an event; on a full disk, write it when there is space again.

        Args:
            name: kind of event.
            text: description.
            step: number of the weight update.
            numbers: further values, for the recorder.
        """
        text = masked_values(text)
        self._recorder.event(name, text, step, **numbers)
        for number in range(len(self._loggers)):
            if not self._attempt(number, lambda logger: logger.log_text(f"events/{name}", text, step)):
                self._lost[number].append((f"events/{name}", text, step))

    def _attempt(self, number: int, write: Callable[[Logger], None]) -> bool:
        logger = self._loggers[number]
        try:
            if number in self._lost:
                logger.open(self._folder)
            write(logger)
            for event in self._lost.get(number, ()):
                logger.log_text(*event)
            if number in self._lost:
                logger.flush()
        except OSError as error:
            if not is_full(error):
                raise
            if number not in self._lost:
                warnings.warn(
                    f"{logger.name} can't write: the disk is full. Training continues without its rows; delete files "
                    "to make room",
                    stacklevel=4,
                )
                self._lost[number] = []
            with contextlib.suppress(OSError):
                logger.close("failed")
            return False
        self._lost.pop(number, None)
        return True

    def close(self, ending: Ending) -> None:
        """Close all loggers.

        Args:
            ending: how the run has ended.

        Raises:
            Exception: the first error of a logger that is not a full disk.
        """
        loggers, self._loggers = self._loggers, []
        errors = []
        for logger in loggers:
            try:
                logger.close(ending)
            except Exception as error:
                errors.append(error)
        if unexpected := [error for error in errors if not is_full(error)]:
            raise unexpected[0]
