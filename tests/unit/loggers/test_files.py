"""Loggers keep a single value per step if a run rolls back to an earlier step in the same folder."""

from __future__ import annotations

import csv
import json
import os
import pickle
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only

import fabricx as fx
from fabricx.core.logger import Logger, Silent
from fabricx.loggers import CSVLogger, JSONLogger, TensorBoardLogger
from fabricx.testing import TinyModule, tiny_loader
from tests import warm


def read(logger: Logger, folder: Path) -> list[tuple[int, float]]:
    if isinstance(logger, TensorBoardLogger):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]
    if isinstance(logger, CSVLogger):
        with (folder / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_later_rows_of_a_killed_run_are_removed(tmp_path: Path, kind: type[Logger]) -> None:
    first = kind()
    first.open(tmp_path)
    for step in (1, 2, 3):
        first.log_metrics({"loss": step / 4, "norm": 1.0}, step)
    first.close()
    for name in ("metrics.csv", "metrics.jsonl"):
        if (tmp_path / name).exists():
            with (tmp_path / name).open("a") as file:
                file.write('{"step": 1, "l' if name.endswith("jsonl") else "1,0.2")  # killed while it wrote
    second = kind()
    second.open(tmp_path)
    second.rewind(2)
    second.log_metrics({"loss": 8.0, "norm": 1.0}, 3)
    second.close()
    assert read(second, tmp_path) == [(1, 0.25), (2, 0.5), (3, 8.0)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_a_row_written_after_the_checkpoint_of_its_step_exists_once(tmp_path: Path, kind: type[Logger]) -> None:
    logger = kind()
    logger.open(tmp_path)
    for loss in (0.5, 0.25):  # of the step, and of the validation that came after the checkpoint
        logger.log_metrics({"loss": loss, "epoch": 0.0}, 2)
    logger.close()
    logger.open(tmp_path)
    logger.rewind(2)
    for loss in (0.25, 0.25, 0.75):  # a repeated validation, a second validation, and a row with different numbers
        logger.log_metrics({"loss": loss, "epoch": 0.0}, 2)
    logger.close()
    assert read(logger, tmp_path) == [(2, 0.5), (2, 0.25), (2, 0.25), (2, 0.75)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
@pytest.mark.parametrize("step", [0, 2])
def test_a_rewind_in_a_running_process_neither_loses_nor_repeats_a_row(
    tmp_path: Path, kind: type[Logger], step: int
) -> None:
    logger = kind()
    logger.open(tmp_path)
    for attempt in (1, 2, 3):
        for later in range(2):
            logger.log_metrics({"loss": later + attempt * (later == 1) / 4}, step + later)
        if attempt < 3:
            logger.rewind(step)
    logger.close()
    assert read(logger, tmp_path) == [(step, 0.0), (step + 1, 1.75)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_the_folder_is_set_before_the_run_and_does_not_change(
    tmp_path: Path, kind: type[Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    logger, other = kind(tmp_path, name="net"), kind(tmp_path, name="net")  # type: ignore[call-arg]
    assert logger.version == 0  # before the first read of the folder
    folder = logger.log_dir
    assert folder == str(tmp_path / "net" / "version_0")
    assert Path(folder).is_dir()  # no other run uses it
    assert (logger.version, other.log_dir) == (0, str(tmp_path / "net" / "version_1"))
    in_worker = pickle.loads(pickle.dumps(logger))
    for _ in range(2):  # a fit and a test
        in_worker.open(tmp_path / "run")
        in_worker.log_hyperparams({"lr": 0.1})
        in_worker.close()
    vars(logger).update(in_worker.for_caller())
    assert logger.log_dir == in_worker.log_dir == folder
    assert (logger.save_dir, logger.root_dir) == (str(tmp_path), str(tmp_path / "net"))  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "1")
    ranks = [kind(tmp_path, name="net") for _ in range(2)]  # type: ignore[call-arg]
    assert [rank.log_dir for rank in ranks] == [str(tmp_path / "net" / "version_2")] * 2  # the same on all ranks
    assert (kind().log_dir, kind().version) == (None, None)  # the folder of a run, which is not set yet


@pytest.mark.parametrize(
    ("kind", "file"), [(CSVLogger, "hparams.yaml"), (JSONLogger, "hparams.json"), (TensorBoardLogger, "hparams.yaml")]
)
def test_hyperparameters_logged_before_the_run_are_written(tmp_path: Path, kind: type[Logger], file: str) -> None:
    logger = kind()
    logger.log_hyperparams({"width": 8})
    logger.open(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.close()
    assert yaml.safe_load((tmp_path / file).read_text()) == {"width": 8, "lr": 0.1}


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_rows_are_written_before_and_after_a_run(tmp_path: Path, kind: type[Logger]) -> None:
    logger: Any = kind(tmp_path / "logs")  # type: ignore[call-arg]
    logger.log_metrics({"loss": 3.0}, step=1)
    logger.open(tmp_path / "run")
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.close()
    logger.log_metrics({"loss": 1.0}, step=3)
    logger.save()
    logger.finalize("success")
    # TensorBoard reads files in the order of their names, which end in numbers.
    assert sorted(read(logger, Path(logger.log_dir))) == [(1, 3.0), (2, 2.0), (3, 1.0)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger])
def test_rows_of_the_runs_folder_are_written_after_the_run_and_a_warning_before_it(
    tmp_path: Path, kind: type[Logger]
) -> None:
    logger: Any = kind(name="here")  # type: ignore[call-arg]
    with pytest.warns(UserWarning, match="is used before the run, whose folder is not known yet"):
        logger.log_metrics({"loss": 3.0}, step=1)
    logger.open(tmp_path)
    logger.close()
    logger.log_metrics({"loss": 1.0}, step=3)
    assert read(logger, tmp_path / "here") == [(3, 1.0)]


def write(logger: Any, value: float, step: int) -> None:
    """Write a value as users of `experiment` do."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_scalar("loss", value, step)
    elif isinstance(logger, CSVLogger):
        logger.experiment.write(f"{step},{value}\n")
    else:
        logger.experiment.write(json.dumps({"step": step, "loss": value}) + "\n")


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_the_writer_is_open_before_and_after_a_run_too(tmp_path: Path, kind: type[Logger]) -> None:
    logger: Any = kind(tmp_path / "logs")  # type: ignore[call-arg]
    logger.log_metrics({"loss": 4.0}, step=0)
    write(logger, 3.0, 1)
    in_worker = pickle.loads(pickle.dumps(logger))  # closes the writer that was opened before the run
    in_worker.open(tmp_path / "run")
    write(in_worker, 2.0, 2)
    in_worker.close()
    vars(logger).update(in_worker.for_caller())
    write(logger, 1.0, 3)
    logger.open(tmp_path / "run")
    logger.log_metrics({"loss": 0.5}, step=4)
    logger.close()
    assert sorted(read(logger, tmp_path / "logs" / "version_0")) == [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_the_writer_does_nothing_on_other_ranks_and_without_a_folder(
    tmp_path: Path, kind: type[Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=r"Logger.experiment is used before the run, whose folder is not known yet"):
        assert isinstance(kind().experiment, Silent)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert isinstance(kind(tmp_path / "logs").experiment, Silent)  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
    from tests.unit.loggers.test_files import CSVLogger, JSONLogger, TensorBoardLogger, write

    for kind in (CSVLogger, JSONLogger, TensorBoardLogger):
        logger = kind("logs", kind.__name__, version="")
        logger.log_metrics({"loss": 2.0}, 1)
        write(logger, 1.0, 2)
"""


def test_rows_written_outside_of_a_run_are_flushed_at_process_exit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    warm.run([sys.executable, "script.py"], check=True, timeout=100, cwd=tmp_path, env=environment)
    for kind in (CSVLogger, JSONLogger, TensorBoardLogger):
        assert sorted(read(kind(), tmp_path / "logs" / kind.__name__)) == [(1, 2.0), (2, 1.0)]


def test_metrics_after_a_run_keep_its_hyperparameters(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version="")
    logger.log_hyperparams({"width": 8})
    logger.open(tmp_path)
    logger.log_hyperparams({"lr": 0.1})
    logger.close()
    logger.log_metrics({"loss": 1.0})
    logger.experiment.add_text("note", "after the run")
    logger.close()
    [session] = tmp_path.glob("*.hparams")
    assert b"width" in session.read_bytes()
    assert b"lr" in session.read_bytes()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger])
def test_epochs_are_written_as_integers(tmp_path: Path, kind: type[Logger]) -> None:
    logger: Any = kind(tmp_path, version="")  # type: ignore[call-arg]
    logger.log_metrics({"loss": 3.0, "epoch": 2.0}, step=1)
    [file] = [path for path in tmp_path.iterdir() if path.stem == "metrics"]
    assert file.read_text().splitlines()[-1].rstrip("}").endswith(("3.0,2", " 2"))


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger, TensorBoardLogger])
@pytest.mark.parametrize("calls_super", [True, False])
def test_the_end_of_a_run_calls_finalize_of_a_subclass(kind: Any, calls_super: bool, tmp_path: Path) -> None:
    class CustomLogger(kind):  # type: ignore[misc]
        def finalize(self, status: str = "success") -> None:
            statuses.append(status)
            if calls_super:
                super().finalize(status)

    statuses: list[str] = []
    for ending in ("success", "failed", "interrupted"):
        logger = CustomLogger()
        logger.open(tmp_path)
        logger.close(ending)
        assert (logger._writer, logger._status) == (None, ending)
    assert statuses == ["success", "failed", "aborted"]


def test_a_subclass_that_overrides_save_saves_after_each_row(quiet: dict[str, Any], tmp_path: Path) -> None:
    saved: list[int] = []

    class CustomLogger(CSVLogger):  # type: ignore[misc]
        def save(self) -> None:
            saved.append(len(saved))
            super().save()

    trainer = fx.Trainer(max_epochs=1, log_every_n_steps=1, **{**quiet, "logger": CustomLogger(tmp_path)})
    trainer.fit(TinyModule(), tiny_loader(8, 4))
    assert len(saved) >= trainer.global_step == 2
