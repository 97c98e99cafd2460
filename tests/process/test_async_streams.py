"""Asynchronous workers with streams: each batch of each worker is trained exactly once, also after deaths.

Every worker begins a batch at step 14 or later: the second epoch begins at step 10, and the fifth batch of a worker
in it follows four of its own updates.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.launch.resize import request_workers
from fabricx.strategies import DDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, Fault, Ledger, kill
from fabricx.trainer import process
from tests.soak import params

from .served import serve_and_publish_pid

ROUNDS = AsyncSGD(every=2, outer="sum", damp=False, servers=2)
SAMPLES, BATCH, EPOCHS = 15, 3, 2


class Stream(IterableDataset[Any]):
    """All samples on rank 0, and `fewer` samples less on each further rank: an odd number of batches."""

    def __init__(self, fewer: int = 0) -> None:
        self.fewer = fewer

    def __iter__(self) -> Iterator[Any]:
        for number in range(SAMPLES - self.fewer * dist.get_rank()):
            time.sleep(0.002)  # otherwise a worker may read its whole stream before another worker starts
            yield torch.randn(6), torch.zeros(1), number


def train(
    folder: Path, strategy: fx.Strategy, *callbacks: Any, fewer: int = 0, ckpt: Path | None = None, **options: Any
) -> tuple[list[int], fx.Trainer]:
    """Return how often each sample was trained, and the trainer."""
    torch.manual_seed(1)
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(
        max_epochs=EPOCHS,
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**QUIET, **options},
    )
    trainer.fit(module, DataLoader(Stream(fewer), BATCH), ckpt_path=ckpt)
    counts = [-entry for entry in module.entries.tolist()]
    assert all(abs(count - round(count)) < 1e-4 for count in counts)
    return [round(count) for count in counts], trainer


@pytest.mark.parametrize("fewer", [0, 6])
@pytest.mark.parametrize("interval", [None, 2])
def test_the_last_round_of_a_stream_is_trained(tmp_path: Path, interval: int | None, fewer: int) -> None:
    """Regression: steps of a last round of fewer than `every` steps were lost; snapshots were at different steps."""
    callbacks = [FaultRecovery(every_n_train_steps=interval)] if interval else []
    counts, trainer = train(tmp_path, ROUNDS, *callbacks, fewer=fewer)
    assert counts == [2 * EPOCHS] * (SAMPLES - fewer) + [EPOCHS] * fewer
    assert trainer.global_step == EPOCHS * (2 * SAMPLES - fewer) // BATCH
    assert not trainer.failures


@pytest.mark.parametrize("interval", params([None], [(2,)]))
@pytest.mark.parametrize(
    ("strategy", "fault"),
    params(
        [
            (AsyncSGD(damp=False), kill(rank=1).during("batch end", step=5)),
            (ROUNDS, kill(rank=0).during("backward", step=7)),
        ],
        [
            (ParameterServer(mode="bounded", apply="arrival"), kill(rank=1).during("backward", step=13)),
            (ParameterServer(mode="async"), kill(rank=0).during("batch end", step=3)),
            (AsyncSGD(max_staleness=1), kill(rank=1).during("forward", step=14)),
        ],
    ),
)
def test_all_workers_restart_after_a_death_and_train_each_batch_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: fx.Strategy, fault: Fault, interval: int | None
) -> None:
    """Regression: the progress within a dead worker's stream was unknown; up to half of the batches were repeated."""
    counts, trainer = train(tmp_path, strategy, FaultRecovery(every_n_train_steps=interval), fault)
    assert counts == [2 * EPOCHS] * SAMPLES
    assert len(trainer.failures) == 1
    assert "all workers restart from step" in capfd.readouterr().err


class Saves(fx.Callback):
    """Saves a checkpoint in a hook while workers have read different numbers of batches."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / f"epoch {trainer.current_epoch}")


@pytest.mark.parametrize("strategy", params([ROUNDS], [(AsyncSGD(damp=False),)]))
def test_a_hook_saves_a_checkpoint_while_workers_have_trained_different_numbers_of_batches(
    tmp_path: Path, strategy: fx.Strategy
) -> None:
    counts, trainer = train(tmp_path, strategy, Saves(), fewer=6)
    assert counts == [2 * EPOCHS] * (SAMPLES - 6) + [EPOCHS] * 6
    assert not trainer.failures
    resumed, _ = train(tmp_path, strategy, fewer=6, ckpt=tmp_path / "epoch 0")
    assert resumed == counts


class KillsServer(fx.Callback):
    """Rank 0 kills a server at the beginning of a batch."""

    def __init__(self, server: int, step: int) -> None:
        self.server, self.step, self.killed = server, step, False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and trainer.global_step >= self.step and not self.killed:
            self.killed = True
            os.kill(int(trainer.world.store.get(f"server {self.server}")), signal.SIGKILL)


@pytest.mark.parametrize(("server", "step"), params([(0, 3)], [(1, 5), (0, 13), (1, 14)]))
@pytest.mark.parametrize("strategy", params([AsyncSGD(servers=2, damp=False)], [(ROUNDS,)]))
def test_each_batch_is_trained_once_if_a_server_dies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    strategy: fx.Strategy,
    server: int,
    step: int,
) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    counts, _ = train(tmp_path, strategy, FaultRecovery(), KillsServer(server, step))
    assert counts == [2 * EPOCHS] * SAMPLES
    assert f"server {server} died and is restarted" in capfd.readouterr().err


def test_dropped_gradients_are_refused(tmp_path: Path) -> None:
    """The batch of a dropped gradient would never be trained, because other workers read other streams."""
    with pytest.raises(WorkerFailed, match="use on_stale='wait' or 'damp', or a DataLoader over a map-style dataset"):
        train(tmp_path, AsyncSGD(max_staleness=1, on_stale="drop"))


class Requests(fx.Callback):
    """Requests a third worker."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1 and trainer.current_epoch == 0:
            request_workers(trainer.run_dir, 3)
            while (trainer.run_dir / "workers").exists():  # until the supervisor has read the request
                time.sleep(0.01)


@pytest.mark.parametrize("strategy", params([AsyncSGD(damp=False), DDP()], [LocalSGD(every=2)]))
def test_a_change_of_the_number_of_workers_with_streams_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], strategy: fx.Strategy
) -> None:
    counts, trainer = train(tmp_path, strategy, Requests(), FaultRecovery(), enable_checkpointing=True)
    assert counts == [2 * EPOCHS if isinstance(strategy, AsyncSGD) else EPOCHS] * SAMPLES, counts
    assert not trainer.failures
    assert "each worker reads its own data from DataLoader: the number of workers can't" in capfd.readouterr().err
