"""A full disk loses rows and does not end the run; a resumed run rewinds to the rows of its checkpoint."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.checkpoint import sharded_tensors
from fabricx.core.logger import Ending, Logger
from fabricx.loggers import CSVLogger, JSONLogger, TensorBoardLogger
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.testing import QUIET, TinyModule, tiny_loader


class FullDisk(Logger):
    """Has a full disk between two steps."""

    def __init__(self, full: range, number: int = errno.ENOSPC) -> None:
        self.full, self.number = full, number
        self.rows: list[int] = []
        self.texts: list[tuple[str, int]] = []
        self.opened = self.closed = self.step = 0

    def open(self, run_dir: Path) -> None:
        self.opened += 1

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.step = step
        self._write()
        self.rows.append(step)

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        self._write()
        self.texts.append((name, step))

    def _write(self) -> None:
        if self.step in self.full:
            raise OSError(self.number, os.strerror(self.number))

    def close(self, status: Ending = "success") -> None:
        self.closed += 1


def test_without_disk_space_rows_are_lost_and_events_are_kept(tmp_path: Path) -> None:
    tight, wide = FullDisk(range(2, 4)), FullDisk(range(0))
    logger_dispatcher = LoggerDispatcher([tight, wide], tmp_path)

    def log(step: int) -> None:
        logger_dispatcher.each(lambda logger: logger.log_metrics({}, step))

    log(0)
    log(1)
    with pytest.warns(UserWarning, match="disk is full"):
        log(2)
    logger_dispatcher.event("restart", "rank 1", 9)
    for step in (3, 4, 5):
        log(step)  # without a second warning
    assert (tight.rows, wide.rows) == ([0, 1, 4, 5], list(range(6)))
    assert tight.texts == wide.texts == [("events/restart", 9)]
    assert tight.opened == tight.closed + 1


def test_other_errors_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"):
        LoggerDispatcher([FullDisk(range(1), errno.EIO)], tmp_path).each(lambda logger: logger.log_metrics({}, 0))


@pytest.mark.parametrize(("kind", "name"), [(CSVLogger, "metrics.csv"), (JSONLogger, "metrics.jsonl")])
def test_a_truncated_row_is_dropped(tmp_path: Path, kind: Any, name: str) -> None:
    for step in (1, 2):
        logger = kind()
        logger.open(tmp_path)
        logger.log_metrics({"loss": 0.5}, step)
        logger.close()
        whole = (tmp_path / name).read_bytes()
        with (tmp_path / name).open("ab") as file:
            file.write(b'3,0.2,"{')
    logger.open(tmp_path)
    logger.close()
    assert (tmp_path / name).read_bytes() == whole


def test_training_continues_with_a_full_disk_and_saves_when_space_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sharded_tensors.write
    calls: list[Path] = []

    def twice_without_room(path: Path, tensors: Any) -> Any:
        calls.append(path)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    monkeypatch.setattr(sharded_tensors, "write", twice_without_room)
    saver, logger = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1), FullDisk(range(0))
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path, "callbacks": [saver]}
    trainer = fx.Trainer(max_steps=8, **{**options, "logger": logger})
    with pytest.warns(UserWarning, match="the disk is full") as warned:
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 8
    assert len([warning for warning in warned if "step=4.ckpt" in str(warning.message)]) == 1
    assert logger.texts[-2:] == [("events/checkpoint", 4), ("events/checkpoint", 6)]
    assert [path.name for path in checkpoint.list_committed(tmp_path)] == ["step=8.ckpt"]
    assert saver.best_model_path == str(tmp_path / "step=8.ckpt")


def _steps(folder: Path) -> list[int]:
    """Return the steps of the values in a logger's files; TensorBoard discards values as its START events specify."""
    if (table := folder / "metrics.csv").exists():
        with table.open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file)]
    if (lines := folder / "metrics.jsonl").exists():
        return [json.loads(line)["step"] for line in lines.read_text().splitlines()]
    events = EventAccumulator(str(folder)).Reload()
    return [event.step for event in events.Scalars("loss")]


@pytest.mark.parametrize("make", [CSVLogger, JSONLogger, TensorBoardLogger])
@pytest.mark.parametrize(
    ("axes", "kept"), [([32, 64, 96, 128], [32, 64, 160]), ([None] * 4, [1, 2, 3]), ([0, 0, 1, 1], [0, 0, 1])]
)
def test_a_resumed_run_has_the_rows_of_earlier_updates_for_any_step_numbers(
    make: Any, axes: list[float | None], kept: list[int], tmp_path: Path
) -> None:
    loggers = LoggerDispatcher([make(tmp_path, "", "")], tmp_path)
    for update, axis in enumerate(axes, 1):
        loggers.metrics({"loss": 1.0 / update}, update, axis)
    loggers.close("failed")
    loggers = LoggerDispatcher([make(tmp_path, "", "")], tmp_path)
    loggers.rewind(2)
    loggers.metrics({"loss": 0.5}, 2, axes[1])  # repeated after the checkpoint: already present
    loggers.metrics({"loss": 0.1}, 3, kept[-1])
    loggers.close("success")
    if make is TensorBoardLogger and axes[0] == 0:  # it discards by step, and would also discard telemetry of step 1
        kept = [0, 0, 1, 1, 1]
    assert _steps(tmp_path) == kept


def test_rows_of_evaluation_batches_are_rewound_by_updates(tmp_path: Path) -> None:
    loggers = LoggerDispatcher([CSVLogger(tmp_path, "", "")], tmp_path)
    for batch in range(1, 9):
        loggers.metrics({"loss": 1.0}, batch, update=2 if batch < 5 else 4)
    loggers.rewind(2)
    loggers.close("success")
    assert _steps(tmp_path) == [1, 2, 3, 4]


def test_rows_repeated_after_a_recovery_are_written_once(tmp_path: Path) -> None:
    tight = FullDisk(range(0))
    rows = LoggerDispatcher([tight], tmp_path, recovers=True)
    rows.metrics({"loss": 1.0}, 3)
    rows.repeat()  # no row of step 3 is repeated
    rows.metrics({"loss": 1.0}, 4)
    rows.metrics({"loss": 1.0}, 4)  # also twice in a run without faults
    rows.metrics({"val": float("nan")}, 4)
    for _ in range(2):  # two ranks die after these rows
        rows.repeat()
        rows.metrics({"loss": 1.0}, 4)
        rows.metrics({"loss": 1.0}, 4)
        rows.metrics({"val": float("nan")}, 4)
    rows.metrics({"val": 2.0}, 4)  # it was not logged earlier
    rows.metrics({"loss": 1.0}, 4)
    assert tight.rows == [3, 4, 4, 4, 4, 4]
    rows.repeat()
    rows.rewind(2)  # its rows are deleted and repeated
    rows.metrics({"loss": 1.0}, 4)
    assert len(tight.rows) == 7
