"""Workers and servers that die while others train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fabricx import checkpoint, dispatch
from fabricx.callbacks import ModelCheckpoint
from fabricx.errors import WorkerFailed
from fabricx.strategies import AsyncSGD, ParameterServer
from tests.process.served import SAMPLES, Dies, KillsServer, tells_its_pid, train


def test_a_server_that_dies_while_weights_come_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_serve", tells_its_pid)
    strategy = AsyncSGD(snapshot_every=3, servers=2, overlap="forward")
    _, trainer = train(strategy, 2, module=KillsServer(), batch=1)
    assert trainer.global_step == 2 * SAMPLES


@pytest.mark.parametrize(
    "strategy",
    [
        AsyncSGD(servers=2),
        AsyncSGD(max_staleness=1),
        AsyncSGD(max_staleness=1, bound="clock"),
        ParameterServer(mode="bounded", max_staleness=1),
    ],
)
def test_workers_go_on_without_one_that_was_killed(strategy: Any) -> None:
    module, trainer = train(strategy, 3, module=Dies(2), batch=1)
    assert trainer.current_epoch == 2
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    # Three batches of the dead one are in the weights, and its notes are gone; the fourth was trained by another.
    assert len(trained) == 2 * SAMPLES - 3
    aggregate = strategy._settings.aggregate
    if aggregate:  # 3 batches an update, and 2 while there were only so many workers
        assert 15 + 15 <= trainer.global_step <= 15 + 22
    else:
        assert trainer.global_step == 2 * SAMPLES


class Replaced(Dies):
    """Trains so slowly that one that comes for the dead one has something left to do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.04)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "strategy",
    [
        AsyncSGD(servers=2),
        AsyncSGD(max_staleness=1, bound="clock"),
        ParameterServer(mode="bounded", max_staleness=1),
        ParameterServer(backup_workers=1),
        AsyncSGD(every=2, outer="average"),
    ],
)
def test_another_worker_joins_those_that_are_left(strategy: Any, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)]
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": callbacks}
    module, trainer = train(strategy, 3, module=Replaced(2), batch=1, **options)
    assert trainer.current_epoch == 4
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert len(module.by_rank) == 3
    assert len(module.by_rank[2]) > 4  # of the one that came
    assert set(trained) == set(range(SAMPLES))
    if not strategy._settings.backup:  # those of late workers are trained again
        died = 2 if strategy._settings.outer else 3  # batches that the dead one had brought
        assert len(trained) == 4 * SAMPLES - died
    assert len(checkpoint.list_committed(tmp_path)) == 4
    assert trainer.global_step == module.counts[0].updates or strategy._settings.outer


def test_the_main_rank_can_be_done_without() -> None:
    module, trainer = train(AsyncSGD(), 3, module=Dies(0), batch=1)
    assert trainer.failures
    assert all("SIGKILL" in failure for failure in trainer.failures)
    assert trainer.current_epoch == 2
    assert module.validated  # by whoever is the main rank now


@pytest.mark.parametrize(
    "strategy",
    [
        AsyncSGD(snapshot_every=3),
        AsyncSGD(snapshot_every=3, servers=2, link="gloo"),
        ParameterServer(mode="bounded", servers=2, snapshot_every=3),
    ],
)
def test_a_server_that_was_killed_starts_again(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_serve", tells_its_pid)
    module, trainer = train(strategy, 2, module=KillsServer(), batch=1)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 2 * (22 if strategy._settings.aggregate else SAMPLES)
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert set(trained) == set(range(SAMPLES))
    assert 2 * SAMPLES <= len(trained) <= 2 * SAMPLES + 2 * 3 + 2  # once more: updates since the snapshot, and in work


@pytest.mark.parametrize("optimizer", ["worker", "server"])
def test_a_synchronous_run_without_servers_ends_with_a_worker(optimizer: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 failed[\s\S]*SIGKILL"):
        train(ParameterServer(servers=0, optimizer=optimizer), 2, module=Dies(1), batch=1)


def test_a_synchronous_run_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_serve", tells_its_pid)
    with pytest.raises(WorkerFailed, match=r"server 0 failed[\s\S]*SIGKILL"):
        train(ParameterServer(), 2, module=KillsServer(), batch=1)
