"""Ranks without data: a worker that receives no batch of an epoch, and a stream that ends early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import FaultRecovery
from fabricx.core.strategy import Strategy
from fabricx.distributed import world
from fabricx.parameter_server.worker.dealer import LeaseDealer
from fabricx.strategies import DDP, AsyncSGD, LocalSGD, Mesh, ParameterServer, Single
from fabricx.testing import QUIET, kill
from tests.soak import params

EPOCHS = 3


class Idle(fx.Callback):
    """Keep one of two ranks from requesting batches until the other rank has the last batch of the epoch.

    Args:
        folder: empty; shared by the ranks.
        ranks: the waiting rank of each epoch.
    """

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.folder, self.ranks = folder, ranks
        self.leases = 0

    def on_train_start(self, trainer: fx.Trainer, module: fx.Module) -> None:
        self.trainer, self.open, self.ask = trainer, LeaseDealer.open, LeaseDealer.ask
        LeaseDealer.open = self._open  # type: ignore[method-assign]
        LeaseDealer.ask = self._ask  # type: ignore[method-assign]

    def _open(self, leases: int, *args: Any) -> None:
        self.leases = leases
        self.open(self.trainer._sessions.newest.dealer, leases, *args)

    def _ask(self, *, wait: bool) -> Any:
        epoch = self.trainer.current_epoch
        granted, waits = self.folder / f"{epoch}", self.trainer.global_rank == self.ranks[epoch]
        while waits and not granted.exists():
            time.sleep(0.01)
        lease = self.ask(self.trainer._sessions.newest.dealer, wait=wait)
        if lease.lease == self.leases - 1:
            granted.touch()
        return lease

    def on_train_end(self, trainer: fx.Trainer, module: fx.Module) -> None:
        LeaseDealer.open, LeaseDealer.ask = self.open, self.ask  # type: ignore[method-assign]
        del self.open, self.ask, self.trainer


class Net(fx.Module):
    """Logs values with all kinds of reductions; has buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.mean = torchmetrics.MeanMetric()
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.register_buffer("center", torch.zeros(3))
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.batches += 1
        self.center.lerp_(inputs.mean(0), 0.25)
        loss = (self.net(inputs) - targets).square().mean()
        self.log("loss", loss)
        self.log("twice", 2 * loss.detach(), on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("alone", loss, sync_dist=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("weight", self.net[0].weight.detach().sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def train(strategy: Strategy, folder: Path, idle: list[int], devices: int = 2) -> tuple[Net, dict[str, float], Any]:
    """Return the module, its metrics, and a checkpoint of the last epoch."""
    fx.seed_everything(1)
    folder.mkdir()
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=2, shuffle=True)
    saves = fx.callbacks.ModelCheckpoint(folder / "saved")  # each epoch; "rounds" then averages moments
    callbacks = [saves, Idle(folder, idle)] if devices > 1 else [saves]
    options = QUIET | {"max_epochs": EPOCHS, "enable_checkpointing": True}
    trainer = fx.Trainer(devices=devices, strategy=strategy, callbacks=callbacks, **options)
    module = Net()
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module, metrics, checkpoint.load(saves.best_model_path)


@pytest.mark.parametrize(
    ("create", "like_single"),
    [
        (AsyncSGD, True),
        (lambda: ParameterServer(mode="bounded", max_staleness=1), False),  # an update has batches of both workers
        (lambda: AsyncSGD(outer="average", every=4), False),
    ],
    ids=["async", "bounded", "rounds"],
)
def test_a_run_does_not_depend_on_which_worker_is_idle(
    create: Callable[[], Strategy], like_single: bool, tmp_path: Path
) -> None:
    """Regression: step values were missing or outdated, buffers were those of the idle rank, and step counts mixed."""
    module, metrics, saved = train(create(), tmp_path / "second", [1] * EPOCHS)
    names = {"loss", "twice", "twice_step", "twice_epoch", "most", "mean", "mean_step", "mean_epoch", "weight"}
    assert metrics.keys() - {"alone"} == names
    assert metrics["twice_step"] == pytest.approx(2 * metrics["loss"])
    assert int(module.batches) == EPOCHS * 12
    others = [("first", create(), [0] * EPOCHS, 2), ("both", create(), [number % 2 for number in range(EPOCHS)], 2)]
    if like_single:
        others.append(("single", Single(), [], 1))
    for name, strategy, idle, devices in others:
        other, logged, kept = train(strategy, tmp_path / name, idle, devices)
        assert {key: logged[key] for key in names} == pytest.approx({key: metrics[key] for key in names}), name
        torch.testing.assert_close(other.state_dict(), module.state_dict())
        states, expected = (run["strategy"]["optimizers"][0]["state"] for run in (kept, saved))
        torch.testing.assert_close(states, expected)
        assert kept["schedules"] == saved["schedules"], name


class Uneven(IterableDataset[Any]):
    """A stream with a different part of the samples on each rank."""

    def __init__(self, shares: list[tuple[int, int]]) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[Any]:
        inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        joined = world.current()
        first, last = self.shares[0 if joined is None else joined.rank]
        yield from zip(inputs[first:last], inputs.sum(1, keepdim=True).sin()[first:last], strict=True)


class OnStreams(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validated", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def train_on_streams(
    strategy: Strategy, shares: list[tuple[int, int]], create: Callable[[], Net] = OnStreams, **options: Any
) -> Net:
    fx.seed_everything(1)
    module = create()
    trainer = fx.Trainer(devices=len(shares), strategy=strategy, **QUIET | {"max_epochs": 2} | options)
    validation = DataLoader(TensorDataset(torch.ones(4, 3, dtype=torch.float64)))
    trainer.fit(module, DataLoader(Uneven(shares), batch_size=2), validation)
    return module


@pytest.mark.parametrize("create", [DDP, ParameterServer, AsyncSGD, Mesh])
def test_a_run_without_data_on_the_main_rank_equals_that_of_a_single_process(create: Callable[[], Strategy]) -> None:
    """Regression: batch norm kept the statistics of the main rank, and `async_sgd` had no batch on any rank."""
    single = train_on_streams(Single(), [(0, 24)])
    parallel = train_on_streams(create(), [(0, 0), (0, 24)])
    torch.testing.assert_close(parallel.state_dict(), single.state_dict())


@pytest.mark.parametrize("create", params([DDP, AsyncSGD], [ParameterServer, lambda: LocalSGD(every=3)]))
def test_a_run_resumes_while_a_rank_has_no_data(create: Callable[[], Strategy], tmp_path: Path) -> None:
    """Regression: a metric logged by some ranks only ended the resumed run with "not enough values to unpack"."""

    def run(ckpt_path: Path | None = None) -> Net:
        fx.seed_everything(1)
        module = OnStreams()
        saves = fx.callbacks.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=5)
        options = QUIET | {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [saves]}
        trainer = fx.Trainer(devices=2, strategy=create(), **options)
        trainer.fit(module, DataLoader(Uneven([(0, 0), (0, 24)]), batch_size=2), ckpt_path=ckpt_path)
        return module

    whole = run().state_dict()
    for step in (5, 15):  # within the first and the second epoch
        resumed = run(tmp_path / f"step={step}.ckpt")
        torch.testing.assert_close(resumed.state_dict(), whole, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("create", [DDP, ParameterServer])
def test_a_death_after_the_end_of_a_stream_does_not_change_the_buffers(create: Callable[[], Strategy]) -> None:
    shares = [(0, 6), (6, 24)]
    expected = train_on_streams(create(), shares)
    for rank in range(2):
        recovers = [FaultRecovery(), kill(rank).during("batch end", step=7)]
        recovered = train_on_streams(create(), shares, callbacks=recovers)
        torch.testing.assert_close(recovered.state_dict(), expected.state_dict(), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("create", [DDP, ParameterServer])
def test_a_rank_without_data_is_replaced_after_its_death(create: Callable[[], Strategy]) -> None:
    """Regression: the replacement counted batches of the other rank, and was refused: it had not logged their names."""
    shares = [(0, 24), (0, 0)]
    expected = train_on_streams(create(), shares)
    recovered = train_on_streams(create(), shares, callbacks=[FaultRecovery(), kill(1).during("validation")])
    torch.testing.assert_close(recovered.state_dict(), expected.state_dict(), rtol=0.0, atol=0.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).unsqueeze(1)
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        return x + self.outer(attended.squeeze(1).tanh())


class OnSequences(OnStreams):
    """Treats each feature as a token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block()).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = nn.functional.pad(batch[0].unsqueeze(2), (0, 2))  # 3 features
        tokens = nn.functional.pad(tokens, (0, 0, 0, 1))  # 4 tokens, divisible by two ranks
        return super().training_step([batch[0] + self.blocks(tokens)[:, :3].mean(2), batch[1]], batch_idx)


def test_buffers_after_the_end_of_a_stream_do_not_depend_on_shards_of_the_sequence() -> None:
    """Regression: the buffers of ranks with ended streams were kept."""
    runs = []
    for strategy, copies in ((DDP(), 1), (Mesh(context=2, blocks="Block"), 2)):
        shares = [share for share in ((0, 2), (2, 24)) for _ in range(copies)]
        runs.append(train_on_streams(strategy, shares, OnSequences).state_dict())
    torch.testing.assert_close(runs[1], runs[0])
