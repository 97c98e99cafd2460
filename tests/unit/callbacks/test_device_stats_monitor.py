from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import DeviceStatsMonitor
from fabricx.callbacks.device_stats_monitor import device_stats
from fabricx.loggers import JSONLogger
from fabricx.testing import TinyModule, tiny_loader


def test_the_load_of_the_machine_is_logged_before_and_after_batches(quiet: dict[str, Any], tmp_path: Path) -> None:
    options = quiet | {"logger": JSONLogger(tmp_path), "log_every_n_steps": 2}
    fx.Trainer(max_steps=4, callbacks=DeviceStatsMonitor(), **options).fit(TinyModule(), tiny_loader())
    lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    rows = [line for line in lines if "cpu_vm_percent" in line]
    assert [("batch_start/" in row, "batch_end/" in row) for row in rows] == [(True, False), (False, True)] * 2


def test_without_a_logger_it_is_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no logger"):
        fx.Trainer(max_steps=1, callbacks=DeviceStatsMonitor(), **quiet).fit(TinyModule(), tiny_loader())


def test_a_cpu_has_no_statistics_of_a_gpu() -> None:
    assert device_stats(torch.device("cpu")) == {}
