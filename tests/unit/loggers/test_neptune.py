"""Calls to the client of Neptune, with a fake: the client is not a requirement of the tests."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import fabricx.loggers.neptune as module
from fabricx.loggers import NeptuneLogger


def test_a_run_receives_metrics_and_hyperparameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    double = mock.MagicMock()
    monkeypatch.setattr(module, "client", lambda name: double)
    monkeypatch.setattr(module, "require", lambda *names: None)
    logger = NeptuneLogger(api_key="k", project="a/b", mode="offline")
    logger.open(tmp_path)
    started = double.init_run.call_args.kwargs
    assert started == {
        "project": "a/b", "name": tmp_path.name, "api_token": "k", "custom_run_id": logger.version, "mode": "offline",
    }  # fmt: skip
    run = double.init_run.return_value
    logger.log_metrics({"loss": 1.5}, 3)
    assert run.__getitem__.call_args == mock.call("training/loss")
    assert run.__getitem__.return_value.append.call_args == mock.call(1.5, step=3)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_text("config", "lr: 1")
    logger.close()
    assert run.stop.call_count == 1
    with pytest.raises(ValueError, match="checkpoints are not uploaded"):
        NeptuneLogger(log_model_checkpoints=True)
