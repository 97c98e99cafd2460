"""Stopped or hanging processes, such as ranks and fork servers, are ended or continued."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance import deadlock
from fabricx.strategies import DDP, FSDP, AsyncSGD, Mesh, ParameterServer
from fabricx.testing import QUIET, Ledger, freeze, hang
from tests import warm
from tests.soak import params

from .ledgers import BATCH, EPOCHS, SAMPLES, Numbered, exact, train


@pytest.mark.parametrize("strategy", params([DDP(), ParameterServer()], [FSDP(), AsyncSGD(damp=False)]))
def test_a_frozen_rank_is_ended_and_the_run_continues(strategy: Any, tmp_path: Path) -> None:
    recovery = FaultRecovery(every_n_train_steps=2, frozen_after=1.5)
    module, trainer = train(strategy, [freeze(rank=1).during("forward", step=5)], tmp_path, recovery=recovery)
    assert exact(module, EPOCHS * (2.0 if isinstance(strategy, AsyncSGD) else 1.0)), (trainer.failures, module.entries)
    if not isinstance(strategy, AsyncSGD):  # in asynchronous training, the other workers continue with a replacement
        # Rank 0 may also freeze on a busy machine.
        assert any("failed: it sent no heartbeat" in failure for failure in trainer.failures)


def test_ranks_without_progress_are_ended_and_the_run_continues(tmp_path: Path) -> None:
    recovery = FaultRecovery(every_n_train_steps=2, stuck_after=3.0)
    module, trainer = train(DDP(), [hang(rank=1).during("optimizer", step=5)], tmp_path, recovery=recovery)
    assert exact(module)
    # On a busy machine, another slow rank may be ended as well.
    assert any("it completed no batch for" in failure for failure in trainer.failures)


class DiesOnce(Numbered):
    """Kills the process that loads sample 17, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 17 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_the_death_of_a_loader_process_is_recovered(tmp_path: Path) -> None:
    recovery = FaultRecovery(every_n_train_steps=2)
    data = DiesOnce(tmp_path / "died")
    module, trainer = train(DDP(), [], tmp_path, recovery=recovery, data=data, num_workers=1)
    assert exact(module)
    assert any("DataLoader worker" in failure for failure in trainer.failures)  # the other rank may report first


class Pauses(Ledger):
    """Rank 1 is stopped for a second, and continued by another process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4 and self.global_rank == 1:
            subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def test_a_short_pause_of_a_rank_has_no_effect(tmp_path: Path) -> None:
    recovery = FaultRecovery(frozen_after=60.0)
    module, trainer = train(DDP(), [], tmp_path, recovery=recovery, module=Pauses(SAMPLES, BATCH))
    assert trainer.failures == []
    assert exact(module)


class StopsForkServer(fx.Callback):
    """Rank 1 stops the fork server of all ranks permanently, and kills itself."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 4 and not trainer.world.generation:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_stopped_fork_server_is_continued(tmp_path: Path) -> None:
    stops: Any = StopsForkServer()
    module, trainer = train(DDP(), [stops], tmp_path)
    assert exact(module)
    [failure] = trainer.failures
    assert failure.startswith("rank 1 failed: its process was killed by SIGKILL")


class StopsLoaders(DiesOnce):
    """Stops the process that loads sample 17, and its fork server."""

    def __getitem__(self, index: int) -> Any:
        if index == 17 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def test_stopped_loader_processes_are_continued(tmp_path: Path) -> None:
    data = StopsLoaders(tmp_path / "stopped")
    module, trainer = train(DDP(), [], tmp_path, data=data, num_workers=1)
    assert data.mark.exists()
    assert exact(module)
    assert trainer.failures == []


@pytest.fixture
def quick_deadlock_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query the ranks after a second, and again after another second."""
    monkeypatch.setattr(deadlock, "AFTER_S", 1.0)
    monkeypatch.setattr(deadlock, "AGAIN_S", 1.0)


class OneSided(fx.Module):
    """Calls the module on rank 0 only, in a step of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Any) -> Tensor:
        output: Tensor = self.net(batch)
        return output

    def validation_step(self, batch: Any) -> None:
        if self.trainer.is_global_zero:
            self.log("loss", self(batch).sum())

    def training_step(self, batch: Any) -> Tensor:
        return self(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("strategy", params([FSDP(), Mesh(pipeline=2)], [Mesh(tensor=2)]))
def test_ranks_in_different_collectives_are_an_error_with_both_positions(
    strategy: Any, tmp_path: Path, quick_deadlock_detection: None
) -> None:
    data = [torch.ones(2, 4)] * 2
    trainer = fx.Trainer(
        **QUIET, devices=2, strategy=strategy, max_epochs=1, default_root_dir=tmp_path, num_sanity_val_steps=0
    )
    with pytest.raises(WorkerFailed) as error:
        trainer.fit(OneSided(), data, data)
    text = str(error.value)
    assert "the ranks wait for each other in different collectives, without end" in text
    assert "rank 0 is at" in text
    assert "rank 1 is at" in text
    assert "call the module on all ranks" in text


class SavesOnMainRank(OneSided):
    """Reads a weight on rank 0 only, in a hook; the other ranks continue to the end of the run."""

    def validation_step(self, batch: Any) -> None: ...

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.net[0].weight.sum()


@pytest.mark.parametrize("strategy", params([FSDP()], [Mesh(tensor=2), Mesh(pipeline=2)]))
def test_a_hook_that_reads_sharded_weights_on_one_rank_is_an_error(
    strategy: Any, tmp_path: Path, quick_deadlock_detection: None
) -> None:
    trainer = fx.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerFailed) as error:
        trainer.fit(SavesOnMainRank(), [torch.ones(2, 4)] * 2)
    text = str(error.value)
    assert "rank 0 waits in a read of net.0.weight, which is divided over ranks, rank 1 waits in " in text
    assert "read weights on all ranks, and then write them on one" in text


class GathersOnce(OneSided):
    """Gathers on rank 0 only, while the other ranks continue to the reduction of gradients."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            self.all_gather(torch.ones(1))


@pytest.mark.parametrize(
    "strategy",
    params(
        [DDP(), ParameterServer(servers=1)],
        [ParameterServer(servers=0), ParameterServer(servers=2, optimizer="server")],
    ),
)
def test_a_rank_that_waits_for_gradients_which_other_ranks_never_send_is_an_error(
    strategy: Any, tmp_path: Path, quick_deadlock_detection: None
) -> None:
    trainer = fx.Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerFailed, match="the ranks wait for each other in different collectives") as error:
        trainer.fit(GathersOnce(), [torch.ones(2, 4)] * 6)
    assert re.search(
        r"rank 0 is at .*test_standstill\.py:\d+ in on_train_batch_end: self\.all_gather", str(error.value)
    )


class Crashes(OneSided):
    """Crashes in a step, like a faulty library."""

    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1:
            os.abort()
        return super().training_step(batch)


def test_the_error_after_a_crash_contains_the_line_of_the_crashed_rank(tmp_path: Path) -> None:
    trainer = fx.Trainer(**QUIET, devices=2, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(WorkerFailed, match=r"killed by SIGABRT at .*test_standstill\.py:\d+ in training_step"):
        trainer.fit(Crashes(), [torch.ones(2, 4)] * 2)


LAUNCHED = """
import torch
import fabricx as fx
from fabricx.fault_tolerance import deadlock
from fabricx.launch import launch_watch
from fabricx.testing import QUIET, TinyModule, tiny_loader

deadlock.AFTER_S = deadlock.AGAIN_S = launch_watch.POST_S = 0.5
launch_watch.LOOK_S = 0.2


class Net(TinyModule):
    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self.all_gather(torch.ones(1))


fx.Trainer(max_epochs=2, **QUIET).fit(Net(), tiny_loader())
"""


def test_ranks_of_torchrun_in_different_collectives_are_an_error(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = warm.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode
    assert "the ranks wait for each other in different collectives, without end: rank 0 waits in all_" in done.stderr
    assert re.search(r"rank 0 is at .*script\.py:\d+ in on_train_epoch_end: self\.all_gather", done.stderr)
