"""The contract suites of loggers, callbacks and launchers name promises that an implementation breaks."""

from __future__ import annotations

import csv
import json
import math
import random
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import fabricx as fx
from fabricx.callbacks import EMA, EarlyStopping
from fabricx.loggers import CSVLogger, JSONLogger
from fabricx.testing import (
    BrokenContract,
    callback_contract,
    check_callback,
    check_launcher,
    check_logger,
    launcher_contract,
)
from tests.soak import params


def rows(run_dir: Path) -> Iterator[tuple[int, str, float]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield from ((int(row["step"]), name, float(row[name])) for name in row if name != "step" and row[name])


def lines(run_dir: Path) -> Iterator[tuple[int, str, float]]:
    for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        named = {name: value for name, value in row.items() if name not in ("step", "time") and value is not None}
        yield from ((row["step"], name, value) for name, value in named.items())


class Keeps(fx.Logger):
    """Writes rows, and rewinds none."""

    def open(self, run_dir: Path) -> None:
        self.path = run_dir / "metrics.csv"
        if not self.path.exists():
            self.path.write_text("step,loss\n")

    def log_metrics(self, metrics: Any, step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step},{metrics['loss']}\n")

    def close(self, status: Any) -> None:
        """Has no default, which a run does not need."""


class Changes(fx.Logger):
    """Writes other values than it receives.

    Args:
        change: returns the values to write.
    """

    def __init__(self, change: Any) -> None:
        self.inner, self.change = CSVLogger(), change

    def open(self, run_dir: Path) -> None:
        self.inner.open(run_dir)

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.inner.log_metrics(self.change(metrics), step)

    def rewind(self, step: int) -> None:
        self.inner.rewind(step)

    def close(self, status: Any = "success") -> None:
        self.inner.close(status)


def only_loss(metrics: Any) -> Any:
    return {"loss": metrics["loss"]}


def without_nan(metrics: Any) -> Any:
    return {name: 0.0 if math.isnan(value) else value for name, value in metrics.items()}


def hyperparameters(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "hparams.json").read_text()))


class Forgets(fx.Callback):
    """Stops at the third validation, and has no state."""

    validations = 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validations += 1
        trainer.should_stop = self.validations == 3


class Counts(fx.Callback):
    """Counts the starts of batches in its state, and doesn't return to a smaller number."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = max(self.batches, state_dict["batches"])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1


class Collects(fx.Callback):
    """Calls a collective after each batch that this rank has."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.world.all_reduce(torch.ones(3))


class MeansOfBatches(fx.Callback):
    """Logs the mean over ranks of the mean over batches, without weights by samples."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.means: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means[batch_idx] = batch[0].mean()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        mean = torch.stack([*self.means.values()]).mean()
        trainer.world.all_reduce(mean)
        self.log("mean", mean / trainer.world.size)


class MeansOfSamples(MeansOfBatches):
    """Logs the mean over samples."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means[batch_idx] = torch.stack([batch[0].sum(), torch.tensor(float(batch[0].numel()))])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        sums = torch.stack([*self.means.values()]).sum(0)
        trainer.world.all_reduce(sums)
        self.log("mean", sums[0] / sums[1])


def of_python() -> float:
    """Draw a number; the bound method would be sent to workers with a copy of its generator."""
    return random.random()


def of_numpy() -> float:
    return float(np.random.rand())


class Noise(fx.Callback):
    """Multiplies gradients by a random number of rank 0, which differs from the number drawn by a single process."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        factor = trainer.world.broadcast(torch.tensor(1 + self.draw()))
        for parameter in module.parameters():
            parameter.grad *= factor


class Upserts(fx.Logger):
    """Replaces the row of a step by a later row, and rewinds none."""

    def open(self, run_dir: Path) -> None:
        self.path = run_dir / "rows.json"

    def log_metrics(self, metrics: Any, step: int) -> None:
        written = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.path.write_text(json.dumps({**written, str(step): metrics["loss"]}))


def upserted(run_dir: Path) -> Iterator[tuple[int, str, float]]:
    for step, loss in json.loads((run_dir / "rows.json").read_text()).items():
        yield int(step), "loss", loss


class Flat(Upserts):
    """Accepts no hyperparameters other than numbers and texts."""

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        assert all(isinstance(value, (float, str)) for value in params.values()), "not a number or a text"


class Connects(Upserts):
    """Opens a connection before it is sent to a worker."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")


def test_a_logger_that_keeps_replaced_rows_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"'loss' of the steps \[1, 2, 3, 4\], not \[1, 2, 3\]. Does rewind"):
        check_logger(Upserts, upserted)


def test_a_logger_that_cannot_be_sent_or_refuses_nested_hyperparameters_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"cannot be sent to a worker: .*sqlite3.Connection.* in open"):
        check_logger(Connects, upserted)
    with pytest.raises(AssertionError, match="not a number or a text"):
        check_logger(Flat, upserted)


@pytest.mark.parametrize("draw", [of_python, of_numpy])
def test_a_callback_that_draws_random_numbers_is_not_compared_with_a_single_process(draw: Any) -> None:
    callback_contract._check_uneven(lambda: Noise(draw), {})


def test_a_logger_without_rewind_is_named() -> None:
    with pytest.raises(
        BrokenContract, match=r"'loss' of the steps \[1, 2, 3, 3, 4\], not \[1, 2, 3\]. Does rewind delete"
    ):
        check_logger(Keeps, rows)


def test_a_logger_that_omits_or_changes_values_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"has no 'accuracy'. Does log_metrics write every metric"):
        check_logger(lambda: Changes(only_loss), rows)
    with pytest.raises(BrokenContract, match=r"'nan' of step 1 is 0.0, and was nan"):
        check_logger(lambda: Changes(without_nan), rows)


def test_a_logger_that_omits_or_changes_hyperparameters_is_named() -> None:
    with pytest.raises(BrokenContract, match="no hyperparameter 'lr'"):
        check_logger(CSVLogger, rows, lambda run_dir: {})
    with pytest.raises(BrokenContract, match=r"'optimizer' is 'adam', and was 'sgd'"):
        check_logger(CSVLogger, rows, lambda run_dir: {"lr": 0.1, "optimizer": "adam"})


@pytest.mark.parametrize("make", params([], [CSVLogger]))
def test_a_logger_of_fabricx_keeps_the_contract(make: Any) -> None:
    check_logger(make, rows)


def test_the_json_lines_logger_keeps_the_contract() -> None:
    check_logger(JSONLogger, lines, hyperparameters)


@pytest.mark.usefixtures("warm_ranks")
def test_a_callback_that_does_not_restore_its_state_is_named() -> None:
    with pytest.raises(
        BrokenContract,
        match=r"of the resumed run: 16; without an interruption: 12.*state_dict",
    ):
        check_callback(Forgets, num_sanity_val_steps=0)


def test_runs_that_differ_by_a_step_name_the_stop_of_a_single_rank() -> None:
    one_more, two_more, whole = (cast("Any", SimpleNamespace(step=step)) for step in (8, 9, 7))
    with pytest.raises(BrokenContract, match=r"resumed run: 8; .*: 7. Why. If a single rank requests a stop"):
        callback_contract._compare("resumed", one_more, whole, "Why.")
    with pytest.raises(BrokenContract, match=r"resumed run: 9; .*: 7. Why.$"):
        callback_contract._compare("resumed", two_more, whole, "Why.")


def test_a_callback_that_counts_a_batch_twice_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"after the death of a worker: the state is .*'batches': 17.*interrupted"):
        check_callback(Counts)


@pytest.mark.parametrize("make", params([], [lambda: EarlyStopping("val_loss"), EMA]))
def test_a_callback_of_fabricx_keeps_the_contract(make: Any) -> None:
    check_callback(make)


@pytest.mark.usefixtures("warm_ranks")
def test_a_mean_that_is_not_weighted_by_samples_is_named() -> None:
    callback_contract._check_uneven(MeansOfSamples, {})
    with pytest.raises(BrokenContract, match=r"metrics on several ranks: .*'mean'.*in one process: .*The last batch"):
        callback_contract._check_uneven(MeansOfBatches, {})


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("make", params([lambda: EarlyStopping("val_loss")], [EMA, Counts]))
def test_a_callback_may_be_on_a_rank_without_a_sample(make: Any) -> None:
    callback_contract._check_uneven(make, {})


@pytest.mark.usefixtures("warm_ranks")
def test_a_collective_in_a_hook_of_batches_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"(?s)different collectives. A rank without a sample.*omits the hooks"):
        callback_contract._check_uneven(Collects, {})


LAUNCH = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(rank)}) for rank in (0, 1)]
"""


def test_a_launcher_that_breaks_the_contract_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 or more"):
        check_launcher(["torchrun"], ranks=1)
    hides = [sys.executable, "-c", f"{LAUNCH}\nranks[1].wait(); ranks[0].kill(); ranks[0].wait()"]
    with pytest.raises(BrokenContract, match="exited with status 7, and the launcher with status 0"):
        launcher_contract._check_failing(hides, tmp_path, 60)
    rank = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    first, second = {**rank, "RANK": "0", "LOCAL_RANK": "0"}, {**rank, "RANK": "1", "LOCAL_RANK": "1"}
    launcher_contract._check_numbers([first, second], 2)
    for wrong, message in [
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE is 1, 2 on 2 ranks"),
        ({"RANK": "0"}, r"RANK is \[0, 0\]"),
        ({"LOCAL_RANK": "0"}, r"machine 0 has 2 ranks: LOCAL_RANK is \[0, 0\]"),
    ]:
        with pytest.raises(BrokenContract, match=message):
            launcher_contract._check_numbers([first, {**second, **wrong}], 2)
