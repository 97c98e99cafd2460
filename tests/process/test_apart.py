"""What ranks that go at their own pace have in common where they meet: statistics, averages, metrics."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

import fabricx as fx
from fabricx.callbacks import EMA
from fabricx.strategies import AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, LayeredModule
from tests.process.served import SAMPLES, Recorded, train
from tests.soak import params


class Normed(LayeredModule):
    """Learns statistics of its inputs; the first rank is slow."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.mean_norm = nn.BatchNorm1d(6, momentum=None)
        self.unnumbered = nn.InstanceNorm1d(6, track_running_stats=True)  # does not count its batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.unnumbered(batch[0][None].transpose(1, 2))
        return super().training_step(batch, batch_idx)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs) + self.mean_norm(inputs))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and self.trainer.world.size > 1:
            time.sleep(0.05)


def same_batches() -> DataLoader[Any]:
    """Return 24 batches of the same samples: then it is of no matter which worker has which."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 3 + 5
    return DataLoader(TensorDataset(inputs.repeat(24, 1), inputs.repeat(24, 1).sum(1, keepdim=True)), 4)


def test_running_statistics_are_those_of_one_process_however_uneven_workers_are() -> None:
    def fit(strategy: Any, devices: int) -> Normed:
        module = Normed()
        options: Any = {**QUIET, "max_epochs": 2, "limit_train_batches": None if devices == 1 else 1.0}
        trainer = fx.Trainer(devices=devices, strategy=strategy, **options)
        trainer.fit(module, same_batches())
        return module

    wanted, found = fit(Single(), 1), fit(AsyncSGD(), 3)
    for name in ("norm", "mean_norm"):
        one, other = getattr(wanted, name), getattr(found, name)
        assert torch.allclose(other.running_mean, one.running_mean, rtol=1e-4)
        assert torch.allclose(other.running_var, one.running_var, rtol=1e-4)
        assert int(other.num_batches_tracked) == int(one.num_batches_tracked) == 48


class CutsItsLink(Normed):
    """Rank 1 ends its link with the server in its third batch, which is dealt again; it counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = BinaryAccuracy()
        self.batches = 0
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1
        self.counted(torch.ones(1), torch.ones(1))
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and self.batches == 3:
            strategy: Any = self.trainer.strategy
            connection = strategy._exchange.servers.buffers[0].link._link._connection
            with socket.socket(fileno=os.dup(connection.fileno())) as link:
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):  # until the server has seen it, and closes its end
                    pass
            time.sleep(0.1)  # it takes the lease back next
        return loss

    def on_train_epoch_end(self) -> None:
        self.count += sum(self.all_gather(self.counted.metric_state["tp"].float().sum()).tolist())
        self.counted.reset()
        self.dropped = self.trainer.strategy.counts()[0].dropped


def test_a_batch_that_is_repeated_because_a_link_was_cut_counts_once() -> None:
    wanted = Normed()
    fx.Trainer(**{**QUIET, "max_epochs": 2}).fit(wanted, same_batches())
    overlapping = AsyncSGD(overlap="forward", max_staleness=1, bound="clock")
    for strategy in (AsyncSGD(), overlapping, AsyncSGD(every=4, outer="average")):
        found = CutsItsLink()
        fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 2}).fit(found, same_batches())
        assert found.dropped > 0
        assert int(found.norm.num_batches_tracked) == int(found.count) == 48
        for name in ("norm", "mean_norm"):
            one, other = getattr(wanted, name), getattr(found, name)
            assert torch.allclose(other.running_mean, one.running_mean, rtol=1e-4)
            assert torch.allclose(other.running_var, one.running_var, rtol=1e-4)
        assert torch.allclose(found.unnumbered.running_mean, wanted.unnumbered.running_mean, rtol=1e-4)


class Averaged(Recorded):
    def on_train_end(self) -> None:
        super().on_train_end()
        [ema] = [callback for callback in self.trainer.callbacks if isinstance(callback, EMA)]
        self.updates = ema.updates
        ema._join_ranks()
        self.averages = self.trainer.world.gather_objects(ema.averages)


def averaged(strategy: Any, devices: int, **options: Any) -> Averaged:
    ema = EMA(0.7, apply_at_end=False, **options)
    module, _ = train(strategy, devices, module=Averaged(), batch=12 // devices, callbacks=[ema])
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("every", params([3], [1]))
def test_averages_are_of_the_newest_weights(every: int) -> None:
    [wanted] = averaged(Single(), 1, every_n_steps=every).averages
    for strategy in (AsyncSGD(), AsyncSGD(overlap="forward"), ParameterServer(mode="bounded")):
        found = averaged(strategy, 1, every_n_steps=every)
        assert all(torch.equal(found.averages[0][name], wanted[name]) for name in wanted), strategy
    found = averaged(ParameterServer(optimizer="server", overlap="forward"), 2, every_n_steps=every)
    assert all(torch.allclose(found.averages[0][name], wanted[name], atol=2e-6) for name in wanted)
    found = averaged(ParameterServer(mode="bounded", max_staleness=0), 3, every_n_steps=every)
    assert found.updates == 8 // every  # also those that came while others computed
    for other in found.averages[1:]:
        assert all(torch.equal(found.averages[0][name], other[name]) for name in other)


class SkipsSome(Recorded):
    """Gives no loss for the batch that has sample 7."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if 7 in batch[2].tolist() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
def test_a_batch_without_a_loss_makes_no_update() -> None:
    for accumulate in (1, 2):
        options: Any = {"batch": 4, "accumulate_grad_batches": accumulate}
        wanted, alone = train(Single(), 1, module=SkipsSome(), **options)
        found, trainer = train(AsyncSGD(), 1, module=SkipsSome(), **options)
        assert trainer.global_step == alone.global_step == (20 if accumulate == 1 else 12)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))


class Counts(Recorded):
    """Logs the number of its samples; the first rank is so slow that its first gradient comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        store = self.trainer.world.store
        self.batches += 1
        if self.global_rank == 0 and self.trainer.world.size > 1:
            assert store is not None
            store.wait(["an update without rank 0"], timedelta(seconds=60))
        elif store is not None and self.batches == 2:
            store.set("an update without rank 0", "")
        self.norm(batch[0])
        self.log("count", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("first", batch[0].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "strategy", [ParameterServer(backup_workers=1), AsyncSGD(max_staleness=0, on_stale="drop", damp=False)]
)
def test_samples_of_dropped_gradients_are_counted_once(strategy: Any) -> None:
    wanted, alone = train(Single(), 1, module=Counts(), batch=4, max_epochs=1)
    found, trainer = train(strategy, 3, module=Counts(), batch=4, max_epochs=1)
    assert found.counts[0].dropped > 0
    assert float(trainer.callback_metrics["count"]) == SAMPLES
    assert float(trainer.callback_metrics["first"]) == pytest.approx(float(alone.callback_metrics["first"]), rel=1e-4)
    assert int(found.norm.num_batches_tracked) == int(wanted.norm.num_batches_tracked) == 11
