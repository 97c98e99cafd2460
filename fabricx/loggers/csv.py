"""Logger that writes metrics as a CSV table."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO, final

from fabricx.core.logger import Silent
from fabricx.loggers.files import (
    UPDATES,
    FolderLogger,
    LoggerFolder,
    by_name,
    of_open_logger,
    prefixed,
    truncate_partial_line,
    with_updates,
    with_whole_epoch,
    write_hyperparameters,
)


@final
class Table:
    """The table of a `CSVLogger`, with the methods of Lightning's `CSVLogger.experiment`, and those of the open file.

    Args:
        logger: writes the table.

    Attributes:
        log_dir: folder of the table.
        hparams: the logged hyperparameters.
    """

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"
    NAME_METRICS_FILE: ClassVar[str] = "metrics.csv"

    def __init__(self, logger: CSVLogger) -> None:
        self._logger = logger
        self.log_dir = logger.log_dir
        self.hparams: dict[str, Any] = {}

    def log_metrics(self, metrics_dict: Mapping[str, float], step: int | None = None) -> None:
        """Write a row.

        Args:
            metrics_dict: values by name.
            step: step of the row; None for 0.
        """
        self._logger.log_metrics(metrics_dict, step)

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters to `hparams.yaml`.

        Args:
            params: values by name.
        """
        self.hparams.update(params)
        self._logger.log_hyperparams(params)

    def save(self) -> None:
        """Write buffered data; each row is written at once."""
        self._logger.save()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied, it has no logger
            raise AttributeError(name)
        return getattr(self._logger._writer, name)


class CSVLogger(FolderLogger[TextIO]):
    """Write `metrics.csv`, with a row for each call of `log_metrics`, and `hparams.yaml`.

    Where the step of rows is a value that the module has logged, or an evaluation batch, `weight_updates` is a column.
    A new metric adds a column: the file is rewritten and replaced atomically, so that it can be read at any time. A
    resumed run appends to the file in its folder.

    Args:
        save_dir: parent folder; default: the run's folder.
        name: subfolder of `save_dir`.
        version: subfolder of `name`; default with a `save_dir`: the next of "version_0", "version_1", ...
        prefix: prefix of the names of metrics.
        flush_logs_every_n_steps: without an effect; each row is written at once.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(LoggerFolder(save_dir, name, version))
        self._prefix = prefix
        self._folder: Path | None = None
        self._columns: list[str] = []
        self._table: Table | None = None
        self._kept: list[dict[str, str]] = []  # rows of the step that a rollback returned to

    def _start(self, folder: Path) -> TextIO:
        self._folder = folder
        truncate_partial_line(folder / "metrics.csv")
        self._columns = _header(folder / "metrics.csv")
        return (folder / "metrics.csv").open("a", newline="")

    @property
    def experiment(self) -> Any:
        """Return the table, as Lightning's logger does; see `FolderLogger.experiment` for other ranks."""
        writer = super().experiment
        if isinstance(writer, Silent):
            return writer
        if self._table is None or self._table.log_dir != self.log_dir:  # of another run
            self._table = Table(self)
        return self._table

    @of_open_logger
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = 0) -> None:
        step = step or 0
        metrics = with_updates(with_whole_epoch(metrics), self.updates_of_row)
        row = {"step": step, **prefixed(metrics, self._prefix)}
        if (text := {name: str(value) for name, value in row.items()}) in self._kept:
            self._kept.remove(text)  # already written: callbacks after the checkpoint repeat it
            return
        if not row.keys() <= set(self._columns):
            self._rewrite([*self._columns, *(name for name in row if name not in self._columns)])
        if self._writer is not None:
            csv.DictWriter(self._writer, self._columns).writerow(row)
            self._writer.flush()

    def rewind(self, step: int) -> None:
        if not self._columns or self._folder is None:
            return
        updates = next(iter(prefixed({UPDATES: 0}, self._prefix)))
        self._rewrite(self._columns, lambda row: _updates(row, updates) <= step)
        with (self._folder / "metrics.csv").open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if _updates(row, updates) == step]
        self._kept = [{name: value for name, value in row.items() if value} for row in kept]

    def _rewrite(self, columns: list[str], keep: Callable[[dict[str, Any]], bool] = lambda row: True) -> None:
        """Rewrite the table with more columns or fewer rows."""
        if self._writer is None or self._folder is None:
            return
        self._writer.close()
        path, temporary = self._folder / "metrics.csv", self._folder / ".metrics.csv-new"
        with path.open(newline="") as old, temporary.open("w", newline="") as new:
            writer = csv.DictWriter(new, columns)
            writer.writeheader()
            writer.writerows(row for row in csv.DictReader(old) if keep(row))
        temporary.replace(path)
        self._columns = columns
        self._writer = path.open("a", newline="")

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        if self._writer is None:
            self._keep(by_name(params), Table.NAME_HPARAMS_FILE)
        elif self._folder is not None and params:
            write_hyperparameters(self._folder / "hparams.yaml", by_name(params))


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _updates(row: Mapping[str, Any], name: str) -> float:
    """Return the weight updates at a row, by name or its step; infinity for an incomplete row, as of a killed run."""
    try:
        return float(row.get(name) or row["step"]) if None not in row.values() else math.inf
    except ValueError:
        return math.inf
