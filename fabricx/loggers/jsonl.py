"""Logger that writes metrics as lines of JSON, for programs, `tail -f` and `jq`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO, final

from fabricx.loggers.files import (
    UPDATES,
    FolderLogger,
    LoggerFolder,
    by_name,
    of_open_logger,
    truncate_partial_line,
    with_updates,
    with_whole_epoch,
    write_hyperparameters,
)


@final
class JSONLogger(FolderLogger[TextIO]):
    """Write `metrics.jsonl`, an object per line, and `hparams.json`.

    Each object has "step", "time" (seconds since 1970) and the metrics; and "weight_updates", where the step is a value
    that the module has logged, or an evaluation batch. NaN and infinity, which JSON lacks, are null.

    Args:
        save_dir: parent folder; default: the run's folder.
        name: subfolder of `save_dir`.
        version: subfolder of `name`; default with a `save_dir`: the next of "version_0", "version_1", ...
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
    ) -> None:
        super().__init__(LoggerFolder(save_dir, name, version))
        self._folder: Path | None = None
        self._kept: list[dict[str, Any]] = []  # rows of the step that a rollback returned to

    def _start(self, folder: Path) -> TextIO:
        self._folder = folder
        truncate_partial_line(folder / "metrics.jsonl")
        return (folder / "metrics.jsonl").open("a")

    @of_open_logger
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = 0) -> None:
        step = step or 0
        whole = with_updates(with_whole_epoch(metrics), self.updates_of_row)
        finite = {name: value if math.isfinite(value) else None for name, value in whole.items()}
        if {"step": step, **finite} in self._kept:  # already written: callbacks after the checkpoint repeat it
            self._kept.remove({"step": step, **finite})
        elif self._writer is not None:
            self._writer.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
            self._writer.flush()

    def rewind(self, step: int) -> None:
        if self._writer is None or self._folder is None:
            return
        self._writer.close()
        path, temporary = self._folder / "metrics.jsonl", self._folder / ".metrics.jsonl-new"
        with path.open() as old, temporary.open("w") as new:
            lines = [line for line in old if _updates(line) <= step]
            new.writelines(lines)
        kept = [json.loads(line) for line in lines if _updates(line) == step]
        self._kept = [{name: value for name, value in row.items() if name != "time"} for row in kept]
        temporary.replace(path)
        self._writer = path.open("a")

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._writer is None:
            self._waiting.update(by_name(params))
        elif self._folder is not None and params:
            write_hyperparameters(self._folder / "hparams.json", by_name(params))


def _updates(line: str) -> float:
    """Return the weight updates at a row; infinity for an incomplete row, as of a killed run."""
    try:
        row = json.loads(line)
        return float(row.get(UPDATES, row["step"]))
    except (ValueError, KeyError, TypeError):
        return math.inf
