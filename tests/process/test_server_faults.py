"""Deaths of workers and servers in asynchronous training."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.errors import WorkerFailed
from fabricx.strategies import AsyncSGD, ParameterServer
from fabricx.testing import QUIET
from fabricx.trainer import process
from tests.process.served import SAMPLES, Dies, KillsServer, serve_and_publish_pid, train
from tests.soak import params


def test_a_server_that_dies_during_the_transfer_of_weights_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    strategy = AsyncSGD(snapshot_every=3, servers=2, overlap="forward")
    _, trainer = train(strategy, 2, module=KillsServer(), batch=1)
    assert trainer.global_step == 2 * SAMPLES


@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(servers=2), AsyncSGD(max_staleness=1, bound="clock")],
        [AsyncSGD(max_staleness=1), ParameterServer(mode="bounded", max_staleness=1)],
    ),
)
def test_workers_continue_without_a_killed_worker(strategy: Any) -> None:
    module, trainer = train(strategy, 3, module=Dies(), batch=1)
    assert trainer.current_epoch == 2
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    # Three batches of the dead worker are in the weights but not in its records; another worker trained the fourth.
    assert len(trained) == 2 * SAMPLES - 3
    aggregate = strategy._settings.aggregate
    if aggregate:  # 3 batches per update, and 2 with only two workers
        assert 15 + 15 <= trainer.global_step <= 15 + 22
    else:
        assert trainer.global_step == 2 * SAMPLES


class Replaced(Dies):
    """Trains slowly, and waits for the replacement of the dead worker, so that batches remain for the replacement."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        deadline = time.monotonic() + 60
        # No generation of three workers is announced yet.
        while self.trainer.world.size == 2 and not self.trainer.session.fault_tolerance.outdated:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.04)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(servers=2)],
        [
            ParameterServer(backup_workers=1),
            ParameterServer(mode="bounded", max_staleness=1),
            AsyncSGD(max_staleness=1, bound="clock"),
            AsyncSGD(every=2, outer="average"),
        ],
    ),
)
def test_a_replacement_joins_the_surviving_workers(strategy: Any, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)]
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": callbacks}
    module, trainer = train(strategy, 3, module=Replaced(), batch=1, **options)
    assert trainer.current_epoch == 4
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert len(module.by_rank) == 3
    assert min(map(len, module.by_rank)) > 4  # also of the replacement
    assert set(trained) == set(range(SAMPLES))
    if not strategy._settings.backup:  # samples of late workers are trained again
        died = 2 if strategy._settings.outer else 3  # batches that the dead worker had sent
        assert len(trained) == 4 * SAMPLES - died
    assert len(checkpoint.list_committed(tmp_path)) == 4
    assert trainer.global_step == module.counts[0].updates or strategy._settings.outer


def test_training_continues_after_the_death_of_the_main_rank() -> None:
    module, trainer = train(AsyncSGD(), 3, module=Dies(main=True), batch=1)
    assert trainer.failures
    assert all("SIGKILL" in failure for failure in trainer.failures)
    assert trainer.current_epoch == 2
    assert module.validated  # on the new main rank


@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(snapshot_every=3), ParameterServer(mode="bounded", servers=2, snapshot_every=3)],
        [AsyncSGD(snapshot_every=3, servers=2, link="gloo")],
    ),
)
def test_a_killed_server_is_restarted(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    module, trainer = train(strategy, 2, module=KillsServer(), batch=1)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 2 * (22 if strategy._settings.aggregate else SAMPLES)
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert set(trained) == set(range(SAMPLES))
    assert len(trained) == 2 * SAMPLES  # none is repeated


@pytest.mark.parametrize("optimizer", params(["server"], ["worker"]))
def test_a_synchronous_run_without_servers_fails_after_the_death_of_a_worker(optimizer: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"rank [01] failed[\s\S]*SIGKILL"):
        train(ParameterServer(servers=0, optimizer=optimizer), 2, module=Dies(), batch=1, enable_fault_recovery=False)


def test_a_synchronous_run_fails_after_the_death_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    with pytest.raises(WorkerFailed, match=r"server 0 failed[\s\S]*SIGKILL"):
        train(ParameterServer(), 2, module=KillsServer(), batch=1, enable_fault_recovery=False)


class Ledger(fx.Module):
    """Counts in its weights, once on each of two servers, how often each sample was used; ranks kill processes.

    Args:
        kills: tuples (rank that kills, number of its batch, killed processes).
    """

    def __init__(self, kills: Sequence[tuple[int, int, tuple[str, ...]]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, LEDGER))
        self.kills = list(kills)
        self.batches = 0
        self.totals: list[float] = []  # per epoch: the sum of the numbers of its samples

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        self.log("numbers", batch.double().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        store = self.trainer.world.store
        for rank, number, names in self.kills:
            if self.trainer.world.generation == 0 and (rank, number) == (self.global_rank, self.batches):
                for name in names:
                    kill(store, name)
        return -self.weight[:, batch].sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.totals.append(float(self.trainer.callback_metrics["numbers"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


LEDGER = 24  # samples


def kill(store: Any, name: str) -> None:
    """Kill this process or a server; if another rank has just killed the server, kill its replacement."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid() if name == "this process" else int(store.get(name)), signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.mark.parametrize(
    "strategy",
    params(
        [
            AsyncSGD(servers=2, damp=False, snapshot_every=3),
            ParameterServer(mode="bounded", servers=2, snapshot_every=3, pull_compression="bf16"),
            AsyncSGD(servers=2, every=3, outer="sum", snapshot_every=2),
        ],
        [AsyncSGD(servers=2, damp=False, snapshot_every=3, overlap="forward", link="gloo")],
    ),
)
def test_each_sample_is_used_once_by_each_server_after_deaths_of_workers_and_servers(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    module = Ledger([(0, 4, ("server 1",)), (1, 7, ("server 0", "server 1")), (1, 10, ("server 1", "this process"))])
    trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(range(LEDGER), 1, shuffle=True), DataLoader([0], 1))
    part = 0.5 if strategy._settings.aggregate else 1.0  # a sample's part of the mean over its global batch
    assert torch.equal(module.weight, torch.full((2, LEDGER), 2 * part)), module.weight
    assert module.totals == [sum(range(LEDGER))] * 2  # logged values are counted once, like samples


class DiesAtStart(Ledger):
    """A process is killed before the beginning of training, once.

    Args:
        rank: the rank that kills.
        name: the killed process.
        mark: a file that exists after the kill.
    """

    def __init__(self, rank: int, name: str, mark: Path) -> None:
        super().__init__([])
        self.rank, self.name, self.mark = rank, name, mark

    def on_fit_start(self) -> None:
        if self.global_rank == self.rank and not self.mark.exists():
            self.mark.touch()
            this_process = self.name == "this process"
            os.kill(os.getpid() if this_process else int(self.trainer.world.store.get(self.name)), signal.SIGKILL)


@pytest.mark.parametrize(
    "strategy", params([AsyncSGD(damp=False, servers=2)], [AsyncSGD(every=2, outer="sum", servers=2)])
)
def test_a_death_before_training_is_recovered_or_ends_the_run_with_the_name_of_the_process(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    loader: Any = DataLoader(range(LEDGER), 1, shuffle=True)
    for number, rank in enumerate((1, 0)):
        module = DiesAtStart(rank, f"server {number}", tmp_path / f"{number}")
        fx.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET).fit(module, loader)
        assert torch.equal(module.weight, torch.ones(2, LEDGER))
    for rank in (0, 1):
        trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=1, enable_fault_recovery=False, **QUIET)
        with pytest.raises(WorkerFailed, match=rf"rank {rank} failed[\s\S]*SIGKILL"):
            trainer.fit(DiesAtStart(rank, "this process", tmp_path / f"rank {rank}"), loader)
