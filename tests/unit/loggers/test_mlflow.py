"""Runs in a folder of MLflow, by its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabricx.loggers import MLFlowLogger

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_worker_continues_the_run_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").mkdir()
    (tmp_path / "model.ckpt" / "weights").write_text("1")
    logger = MLFlowLogger("mine", tags={"a": "b"}, save_dir=tmp_path / "ml", log_model=True, prefix="train")
    state: dict[str, Any] = logger.__getstate__()
    logger.open(tmp_path)
    logger.log_metrics({"loss": 2.0}, 1)
    logger.log_hyperparams({"lr": 0.1, "net": {"deep": [1, 2]}, "long": "x" * 999})
    again = MLFlowLogger.__new__(MLFlowLogger)
    vars(again).update(state)
    again.open(tmp_path)
    assert again.run_id == logger.run_id
    again.log_hyperparams({"lr": 0.2})  # a value can't be changed
    again.log_metrics({"loss": 1.0, "top@1": 3.0}, 2)
    again.log_hyperparams({"a(b)": 1})
    again.log_text("config", "lr: 1")
    again.checkpoints_saved([str(tmp_path / "model.ckpt")])
    service = again.experiment
    again.close("interrupted")
    run = service.get_run(logger.run_id)
    assert run.info.status == "KILLED"
    assert run.data.metrics == {"train-loss": 1.0, "train-top1": 3.0}  # MLflow refuses the other characters
    assert run.data.params["ab"] == "1"
    assert [metric.step for metric in service.get_metric_history(logger.run_id, "train-loss")] == [1, 2]
    assert (run.data.params["lr"], run.data.params["net/deep"], len(run.data.params["long"])) == ("0.1", "[1, 2]", 250)
    assert run.data.tags["a"] == "b"
    assert {file.path for file in service.list_artifacts(logger.run_id)} == {"config.txt", "model"}
    assert (again.name, again.version, again.experiment_id) == ("mine", logger.run_id, run.info.experiment_id)
    vars(again)["_run"] = None
