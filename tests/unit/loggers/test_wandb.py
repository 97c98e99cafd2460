"""Calls to the client of Weights & Biases match its signatures; tests/process/test_logging.py runs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import fabricx.loggers.wandb as module
from fabricx.loggers import WandbLogger

wandb = pytest.importorskip("wandb")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    names = ("init", "Table", "Image", "Artifact")
    double = SimpleNamespace(**{name: mock.create_autospec(getattr(wandb, name)) for name in names})
    double.init.return_value = mock.create_autospec(wandb.Run, instance=True)
    double.init.return_value.dir = str(tmp_path)
    monkeypatch.setattr(module, "client", lambda name: double)
    return double


def test_metrics_have_the_step_as_their_axis(service: Any, tmp_path: Path) -> None:
    logger = WandbLogger(name="mine", version="abc", project="p", prefix="train", tags=["x"], save_dir=tmp_path)
    logger.open(tmp_path)
    expected = {"project": "p", "name": "mine", "id": "abc", "resume": "allow", "dir": str(tmp_path), "tags": ["x"]}
    assert service.init.call_args.kwargs == expected
    run = service.init.return_value
    logger.log_metrics({"loss": 1.5}, 3)
    assert run.log.call_args.args == ({"train-loss": 1.5, "trainer/global_step": 3},)
    logger.log_hyperparams({"net": {"sizes": (1, 2)}})
    assert run.config.update.call_args.args[0]["net"]["sizes"] == [1, 2]
    logger.log_text("config", "lr: 1")
    logger.log_text("events/failure", "rank 1", 4)
    assert (tmp_path / "config.txt").read_text() == "lr: 1\n"
    assert (tmp_path / "events_failure.txt").exists()
    logger.close("failed")
    assert run.finish.call_args.kwargs == {"exit_code": 1}
    assert (logger.name, logger.version) == ("p", "abc")


def test_tables_images_and_checkpoints_are_logged(service: Any, tmp_path: Path) -> None:
    logger = WandbLogger(log_model="all", version="abc")
    logger.open(tmp_path)
    run = service.init.return_value
    logger.log_text(key="samples", columns=["a"], data=[[1]])
    assert run.log.call_args.args == ({"samples": service.Table.return_value},)
    logger.log_image("faces", ["a.png", "b.png"], step=2, caption=["x", "y"])
    assert [call.kwargs["caption"] for call in service.Image.call_args_list] == ["x", "y"]
    assert run.log.call_args.args[0]["trainer/global_step"] == 2
    with pytest.raises(ValueError, match="1 values for 2 images"):
        logger.log_image("faces", ["a.png", "b.png"], caption=["x"])
    logger.watch("module", log_freq=9)
    assert run.watch.call_args.kwargs["log_freq"] == 9
    logger.checkpoints_saved([str(tmp_path / "epoch=1.ckpt")])
    assert service.Artifact.call_args.kwargs == {"name": "model-abc", "type": "model"}
    assert run.log_artifact.call_args.kwargs == {"aliases": ["latest", "epoch_1"]}
    with pytest.raises(ValueError, match="can't be uploaded offline"):
        WandbLogger(offline=True, log_model=True)
