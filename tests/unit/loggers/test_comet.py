"""Calls to the client of Comet, with a fake: the client is not a requirement of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fabricx.loggers.comet as module
from fabricx.loggers import CometLogger


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Any:
    double = mock.MagicMock()
    monkeypatch.setattr(module, "client", lambda name: double)
    monkeypatch.setattr(module, "require", lambda *names: None)
    return double


def test_an_experiment_receives_metrics_and_hyperparameters(service: Any, tmp_path: Path) -> None:
    logger = CometLogger(
        api_key="k", project_name="p", offline=True, experiment_name="mine", save_dir="out", prefix="a"
    )
    logger.open(tmp_path)
    assert service.ExperimentConfig.call_args.kwargs == {"name": "mine", "offline_directory": "out"}
    started = service.start.call_args.kwargs
    assert (started["api_key"], started["project"], started["online"]) == ("k", "p", False)
    assert len(started["experiment_key"]) == 32
    run = service.start.return_value
    logger.log_metrics({"loss": 1.5, "epoch": 2.0}, 3)
    assert run.log_metrics.call_args == mock.call({"a-loss": 1.5}, step=3, epoch=2)
    logger.log_hyperparams({"lr": 0.1})
    assert run.log_parameters.call_args == mock.call({"lr": 0.1})
    logger.log_text("config", "lr: 1")
    logger.log_graph("module", None)
    logger.close("failed")
    assert run.log_other.call_args == mock.call("Status", "failed")
    assert run.end.call_count == 1
    assert (logger.name, logger.version) == ("p", started["experiment_key"])
