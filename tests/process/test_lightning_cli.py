"""Runs of `LightningCLI` on several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.cli.lightning.app import LightningCLI
from fabricx.testing import QUIET, TinyModule, tiny_data


class Data(fx.DataModule):
    """Eight samples, in global batches of four."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_data(8), batch_size=self.batch_size)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "parameter_server"])
def test_a_run_of_lightning_cli_on_two_processes_equals_that_on_a_single_process(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["program"])

    def weights(*arguments: str) -> Any:
        quiet = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
        limits = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=2"]
        optimizer = ["--optimizer=SGD", "--optimizer.lr=0.25", "--optimizer.momentum=0.5"]
        with pytest.warns(UserWarning, match="overridden by"):
            cli = LightningCLI(TinyModule, Data, args=["fit", *quiet, *limits, *optimizer, *arguments])
        assert cli.trainer.log_dir is not None
        config = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
        assert config["optimizer"]["init_args"]["lr"] == 0.25
        assert config["data"] == {"batch_size": int(arguments[0].partition("=")[2])}
        return cli.model.layer.weight.detach()

    two = weights("--data.batch_size=2", "--trainer.devices=2", f"--trainer.strategy={strategy}")
    torch.testing.assert_close(two, weights("--data.batch_size=4"), rtol=1e-6, atol=1e-7)
