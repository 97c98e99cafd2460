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


def test_statistics_of_the_machine_are_logged_before_and_after_batches(quiet: dict[str, Any], tmp_path: Path) -> None:
    options = quiet | {"logger": JSONLogger(tmp_path), "log_every_n_steps": 2}
    fx.Trainer(max_steps=4, callbacks=DeviceStatsMonitor(), **options).fit(TinyModule(), tiny_loader())
    lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    rows = [line for line in lines if "cpu_vm_percent" in line]
    assert [("batch_start/" in row, "batch_end/" in row) for row in rows] == [(True, False), (False, True)] * 2


def test_statistics_are_filtered_and_logged_once_in_an_evaluation(quiet: dict[str, Any], tmp_path: Path) -> None:
    options = quiet | {"logger": JSONLogger(tmp_path), "log_every_n_steps": 4}
    monitor = DeviceStatsMonitor(filter_keys={"cpu_percent", "fans"})
    trainer = fx.Trainer(max_steps=4, callbacks=monitor, **options)
    with pytest.warns(UserWarning, match="filter_keys contains keys not found: fans"):
        trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    names = [
        name for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines() for name in line.split('"')
    ]
    logged = [name for name in names if name.startswith("DeviceStatsMonitor.")]
    hooks = ("train_batch_start", "train_batch_end", "validation_batch_start", "validation_batch_end")
    assert logged == [f"DeviceStatsMonitor.on_{hook}/cpu_percent" for hook in hooks]
    monitor.filter_keys = frozenset({"cpu_percent"})
    for _ in range(2):
        trainer.test(TinyModule(), tiny_loader(), verbose=False)
    rows = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert sum("on_test_batch_start" in row for row in rows) == 2


def test_it_is_refused_without_a_logger(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no logger"):
        fx.Trainer(max_steps=1, callbacks=DeviceStatsMonitor(), **quiet).fit(TinyModule(), tiny_loader())


def test_a_cpu_has_no_statistics_of_a_gpu() -> None:
    assert device_stats(torch.device("cpu")) == {}
