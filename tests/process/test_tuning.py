"""Tuning on several ranks has the results of a single process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_data
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Tuned(TinyModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 8 and self.global_rank == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_data(64), batch_size=self.batch_size)


@pytest.mark.parametrize("strategy", params(["fsdp", "parameter_server"], ["ddp"]))
def test_the_losses_of_a_learning_rate_search_equal_those_of_a_single_process(strategy: str, tmp_path: Path) -> None:
    def search(devices: int) -> Any:
        torch.manual_seed(1)
        trainer = fx.Trainer(
            devices=devices, strategy=strategy if devices > 1 else "auto", **QUIET | {"default_root_dir": tmp_path}
        )
        module, state = Tuned(), torch.get_rng_state()
        before = module.layer.weight.clone()
        loader = DataLoader(tiny_data(19), batch_size=4 // devices, shuffle=True)
        search_result = fx.Tuner(trainer).lr_find(
            module, loader, min_lr=1e-4, num_training=20, early_stop_threshold=None
        )
        assert torch.equal(before, module.layer.weight)
        assert torch.equal(state, torch.get_rng_state())
        assert (trainer.global_step, module.hparams.lr) == (0, search_result.suggestion())
        return search_result.results

    single, parallel = search(1), search(2)
    assert parallel["lr"] == single["lr"]
    assert parallel["loss"] == pytest.approx(single["loss"], rel=1e-5)  # float32 sums in a different order


def test_a_batch_size_that_is_too_large_for_one_rank_is_rejected(tmp_path: Path) -> None:
    module = Tuned()
    trainer = fx.Trainer(devices=2, **QUIET | {"default_root_dir": tmp_path})
    assert fx.Tuner(trainer).scale_batch_size(module, steps_per_trial=1) == module.batch_size == 8


class Killed(Tuned):
    """Rank 1 is killed, as by the system, for a batch of more than 8 samples; rank 0 leaves such a batch to it."""

    begun: Path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 8 and self.global_rank == 1:
            self.begun.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while len(batch[0]) > 8 and not self.begun.exists():
            time.sleep(0.01)
        return TinyModule.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("strategy", ["ddp", "async_sgd"])
def test_a_batch_size_for_which_a_rank_is_killed_is_rejected(strategy: str, tmp_path: Path) -> None:
    """Asynchronous strategies train without the rank, and replace it."""
    module = Killed()
    module.begun = tmp_path / "begun"
    trainer = fx.Trainer(devices=2, strategy=strategy, **QUIET | {"default_root_dir": tmp_path})
    assert fx.Tuner(trainer).scale_batch_size(module, steps_per_trial=1) == module.batch_size == 8
    assert trainer.failures == []
