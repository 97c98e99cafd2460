"""Logged rows and checkpoints of a run with recoveries are those of a single run."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import FaultRecovery, LearningRateMonitor, ModelCheckpoint
from fabricx.loggers import CSVLogger, JSONLogger, TensorBoardLogger
from fabricx.strategies import DDP, FSDP
from fabricx.testing import QUIET, Ledger, TinyModule, kill, tiny_loader
from tests.soak import params

from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, train


def test_rows_and_checkpoints_after_a_recovery_are_those_of_a_single_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 1}
    saver = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, asynchronous=False)
    faults = [kill(rank=1).during("forward", step=7), saver]
    loggers = [JSONLogger(), TensorBoardLogger()]
    _, trainer = train(DDP(), faults, tmp_path, logger=loggers, **options)  # type: ignore[arg-type]
    [folder] = tmp_path.glob("runs/*")
    steps = sorted(checkpoint.read_manifest(path)["step"] for path in checkpoint.list_committed(folder / "checkpoints"))
    assert steps == [3, 6, 9, 12]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row and "val" not in row] == list(range(1, STEPS + 1))
    events = EventAccumulator(str(folder))
    events.Reload()
    event, last = events.Tensors("events/recovery/text_summary")
    assert b"recovered 1 time, 0 samples lost" in last.tensor_proto.string_val[0]
    assert re.search(rb"rank 1 failed: .*; 2 workers continue from step 7", event.tensor_proto.string_val[0])
    assert trainer.failures


class LogsEpochs(Ledger):
    """Logs a mean over the epoch; a dead rank's sums are in its record. Rank 1 has fewer validation batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss.detach().double() / 3, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("batch", float(batch_idx), on_step=True, on_epoch=False)


class DiesAtEpochEnd(fx.Callback):
    """Kills a rank in a hook at the end of the second epoch, `times` times."""

    def __init__(self, rank: int, times: int) -> None:
        self.rank, self.times = rank, times

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.world.rank == self.rank and len(trainer.failures) < self.times:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "rank", "times"),
    params([("parameter_server", 1, 2), ("ddp", 0, 1)], [("ddp", 1, 2), ("parameter_server", 0, 1), ("fsdp", 1, 1)]),
)
def test_each_row_is_logged_once_after_a_death_at_the_end_of_an_epoch(
    strategy: str, rank: int, times: int, tmp_path: Path
) -> None:
    rows = []
    for number, faults in enumerate(([], [DiesAtEpochEnd(rank, times)])):
        _, trainer = train(
            strategy, faults, tmp_path / f"{number}", module=LogsEpochs(SAMPLES, BATCH), logger=JSONLogger(),  # type: ignore[arg-type]
            log_every_n_steps=1, val_samples=33,
        )  # fmt: skip
        [log] = (tmp_path / f"{number}").rglob("metrics.jsonl")
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        rows.append([{n: v for n, v in row.items() if n != "time" and "exchange" not in n} for row in logged])
        assert sum("exchange/sent_mib" in row for row in logged) == (strategy == "parameter_server") * EPOCHS
        assert len(trainer.failures) == number * times
    assert rows[0] == rows[1]


def test_a_replacement_of_the_main_rank_logs_to_the_same_folder(tmp_path: Path) -> None:
    """Regression: the replacement chose the next version, so that the rows of a run were in two folders."""
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    _, trainer = train("ddp", [kill(0).during("forward", step=5)], tmp_path, logger=loggers, log_every_n_steps=1)
    assert len(trainer.failures) == 1
    assert sorted(path.name for path in tmp_path.glob("*/version_*")) == ["version_0", "version_0"]
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(1, STEPS + 1))


def test_a_learning_rate_is_logged_again_after_a_recovery_that_discards_its_row(tmp_path: Path) -> None:
    """The main rank keeps its process, and had logged the rate of the interrupted batch."""
    monitor, fault = LearningRateMonitor("step"), kill(rank=1).during("backward", step=5)
    trainer = fx.Trainer(
        devices=2, strategy=FSDP(), max_epochs=1, log_every_n_steps=1, default_root_dir=tmp_path,
        callbacks=[monitor, fault, FaultRecovery(every_n_train_steps=1)],
        **{**QUIET, "logger": CSVLogger(tmp_path)},
    )  # fmt: skip
    trainer.fit(TinyModule(), tiny_loader(32, 2))
    assert len(trainer.failures) == 1
    rows = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).read_text().splitlines()))
    steps = [int(row["step"]) for row in rows if row.get("lr-SGD")]
    assert steps == list(range(1, 9))
    [logged] = [c for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]
    assert [len(rates) for rates in logged.lrs.values()] == [8]
