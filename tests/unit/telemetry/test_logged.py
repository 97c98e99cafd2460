"""Metrics of runs without telemetry, from the files of their loggers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fabricx.core.logger import Logger
from fabricx.loggers import CSVLogger, JSONLogger, TensorBoardLogger
from fabricx.telemetry.command import main
from fabricx.telemetry.logged import metrics_of
from fabricx.telemetry.report import load_run, runs_in
from tests.unit.telemetry.written import Page


def written_by(logger: Logger, folder: Path) -> Path:
    logger.open(folder)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 0.5, "epoch": 0.0}, step=10)
    logger.log_metrics({"loss": 0.25}, step=3_000_000)
    logger.log_metrics({"val_loss": 0.125}, step=3_000_000)
    logger.log_metrics({"loss": math.nan}, step=3_000_001)
    logger.close()
    return folder


@pytest.mark.parametrize("logger", [CSVLogger, JSONLogger, TensorBoardLogger])
def test_the_files_of_each_logger_are_read(tmp_path: Path, logger: type[Logger]) -> None:
    metrics = metrics_of(written_by(logger(), tmp_path))
    assert metrics["val_loss"] == {3_000_000: 0.125}
    assert [*metrics["loss"].items()][:2] == [(10, 0.5), (3_000_000, 0.25)]
    assert math.isnan(metrics["loss"][3_000_001])
    assert metrics.keys() == {"loss", "val_loss", "epoch"}


def test_the_report_of_a_run_without_telemetry_states_this(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        written_by(CSVLogger(), tmp_path / name)
    assert main("report", [str(tmp_path / "a")]) == 0
    assert "the run recorded no telemetry" in capsys.readouterr().out
    page = Page((tmp_path / "a" / "report.html").read_text())
    assert [len(chart["series"]) for chart in page.data["charts"]] == [1]
    assert "Timeline" not in page.text
    assert main("report", [str(tmp_path)]) == 0
    assert [path.name for path in runs_in(tmp_path)] == ["a", "b"]
    assert load_run(tmp_path / "a").run.steps == 3_000_001


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl", "events.out.tfevents.1"])
@pytest.mark.parametrize("size", [0, 1, 11, 40, 200, 5_000])
def test_damaged_files_have_fewer_values_and_no_error(tmp_path: Path, name: str, size: int) -> None:
    whole = written_by(TensorBoardLogger() if "events" in name else CSVLogger(), tmp_path / "whole")
    [source, *_] = sorted(whole.glob("events.out*")) or [whole / "metrics.csv"]
    data = source.read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / name).write_bytes(data[:size] + b"\xff" * 64 + data[size:][::-1])
    metrics_of(tmp_path / "cut")
