from __future__ import annotations

import json
import math
import time
from pathlib import Path

from fabricx.loggers import JSONLogger


def test_each_line_is_a_json_object(tmp_path: Path) -> None:
    logger = JSONLogger()
    logger.open(tmp_path)
    logger.log_metrics({"loss": 0.5, "epoch": 0.0}, step=10)
    logger.log_metrics({"loss": math.nan, "norm": math.inf}, step=20)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logger.close()
    assert abs(lines[0].pop("time") - time.time()) < 60
    assert lines[0] == {"step": 10, "loss": 0.5, "epoch": 0.0}
    assert lines[1]["loss"] is None
    assert lines[1]["norm"] is None


def test_a_resumed_run_appends_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = JSONLogger()
        logger.open(tmp_path)
        logger.open(tmp_path)  # a second call does nothing
        logger.log_metrics({"loss": 0.5}, step)
        logger.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_hyperparameters_are_written_to_a_file(tmp_path: Path) -> None:
    logger = JSONLogger(tmp_path, name="mine", version="a")
    logger.open(tmp_path / "run")
    logger.log_hyperparams({"lr": 0.1})
    logger.close()
    assert json.loads((tmp_path / "mine" / "a" / "hparams.json").read_text()) == {"lr": 0.1}
