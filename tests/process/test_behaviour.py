"""Modes of submodules, stops within an epoch and values of evaluation batches: equal on one and on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.core.logger import Logger
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.soak import params

pytestmark = [
    pytest.mark.usefixtures("warm_ranks"),
    pytest.mark.filterwarnings("ignore:training begins with 1 module"),
]


class Writes(Logger):
    """Writes rows to a file, for the process that has started the ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, run_dir: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {sorted(metrics)}\n")


class Frozen(TinyModule):
    """Has a frozen batch normalization; requests a stop in the second batch of the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.requires_grad_(False)
        self.norm.eval()
        self.hooked = nn.Dropout()
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        self.hooked.eval()

    def check(self, training: bool) -> None:
        modes = self.training, self.layer.training, self.norm.training, self.hooked.training
        assert modes == (training, training, False, False), modes
        assert torch.is_grad_enabled() is training

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.hooked(self.norm(inputs)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(training=True)
        if self.current_epoch == 1 and self.trainer.global_step >= 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.check(training=False)
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_end(self) -> None:
        self.check(training=False)
        self.seen.append(("validates", self.current_epoch, self.global_step))

    def on_train_epoch_end(self) -> None:
        self.check(training=True)
        self.seen.append(("ends", self.current_epoch, self.global_step))


@pytest.mark.parametrize("strategy", params(["fsdp", "parameter_server", "local_sgd"], ["ddp"]))
def test_modes_stops_and_values_of_evaluation_batches(tmp_path: Path, strategy: str) -> None:
    module, rows = Frozen(), tmp_path / "rows"
    trainer = fx.Trainer(
        max_epochs=3, devices=2, strategy=strategy, num_sanity_val_steps=1, default_root_dir=tmp_path,
        **{**QUIET, "logger": Writes(rows)},
    )  # fmt: skip
    trainer.fit(module, tiny_loader(24, 4), tiny_loader(12, 4))
    steps = trainer.global_step
    assert 4 <= steps < 6  # all ranks stop within the second epoch, before its end
    ends = [("validates", 0, 3), ("ends", 0, 3), ("validates", 1, steps), ("ends", 1, steps)]
    assert module.seen == [("validates", 0, 0), *ends]
    assert {part.training for part in (module.norm, module.hooked)} == {False}  # also in this process
    assert module.training
    single = [line for line in rows.read_text().splitlines() if "batch_step" in line]
    assert [int(line.split()[0]) for line in single] == list(range(1, len(single) + 1))
    assert float(trainer.callback_metrics["batch"]) == float(trainer.callback_metrics["batch_epoch"])
    assert "batch_step" not in trainer.callback_metrics


class LogsAtEpochEnd(TinyModule):
    """Logs a value that differs between ranks in the hook at the end of an epoch, and reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.current_epoch + self.global_rank))
        self.seen.append("end" in self.trainer.callback_metrics or "end" in self.trainer.logged_metrics)


def test_a_value_logged_at_the_end_of_an_epoch_is_absent_until_it_is_reduced(tmp_path: Path) -> None:
    """Regression: it had the value of the previous epoch."""
    module = LogsAtEpochEnd()
    trainer = fx.Trainer(max_epochs=2, devices=2, strategy="ddp", default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, tiny_loader(8, 4))
    assert (module.seen, float(trainer.callback_metrics["end"])) == ([False, False], 1.5)
