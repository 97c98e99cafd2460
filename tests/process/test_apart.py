"""Asynchronous workers: running statistics, weight averages and metrics after their ranks have met."""

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
    """Updates running statistics of its inputs; rank 0 is slow."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.mean_norm = nn.BatchNorm1d(6, momentum=None)
        self.unnumbered = nn.InstanceNorm1d(6, track_running_stats=True)  # does not count batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.unnumbered(batch[0][None].transpose(1, 2))
        return super().training_step(batch, batch_idx)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs) + self.mean_norm(inputs))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and self.trainer.world.size > 1:
            time.sleep(0.05)


def same_batches() -> DataLoader[Any]:
    """Return 24 identical batches, so that their distribution over workers has no effect."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 3 + 5
    return DataLoader(TensorDataset(inputs.repeat(24, 1), inputs.repeat(24, 1).sum(1, keepdim=True)), 4)


def test_running_statistics_of_workers_with_unequal_speeds_equal_those_of_a_single_process() -> None:
    def fit(strategy: Any, devices: int) -> Normed:
        module = Normed()
        options: Any = {**QUIET, "max_epochs": 2, "limit_train_batches": None if devices == 1 else 1.0}
        trainer = fx.Trainer(devices=devices, strategy=strategy, **options)
        trainer.fit(module, same_batches())
        return module

    single, parallel = fit(Single(), 1), fit(AsyncSGD(), 3)
    for name in ("norm", "mean_norm"):
        expected, actual = getattr(single, name), getattr(parallel, name)
        assert torch.allclose(actual.running_mean, expected.running_mean, rtol=1e-4)
        assert torch.allclose(actual.running_var, expected.running_var, rtol=1e-4)
        assert int(actual.num_batches_tracked) == int(expected.num_batches_tracked) == 48


class CutsItsLink(Normed):
    """Rank 1 closes its connection to the server in its third batch, which is dealt again; batches are counted."""

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
                while link.recv(1 << 16):  # until the server closes its end
                    pass
            time.sleep(0.1)  # the server then takes the lease back
        return loss

    def on_train_epoch_end(self) -> None:
        self.count += sum(self.all_gather(self.counted.metric_state["tp"].float().sum()).tolist())
        self.counted.reset()
        self.dropped = self.trainer.strategy.counts()[0].dropped


def test_a_batch_that_is_repeated_after_a_closed_connection_counts_once() -> None:
    reference = Normed()
    fx.Trainer(**{**QUIET, "max_epochs": 2}).fit(reference, same_batches())
    overlapping = AsyncSGD(overlap="forward", max_staleness=1, bound="clock")
    for strategy in (AsyncSGD(), overlapping, AsyncSGD(every=4, outer="average")):
        module = CutsItsLink()
        fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 2}).fit(module, same_batches())
        assert module.dropped > 0
        assert int(module.norm.num_batches_tracked) == int(module.count) == 48
        for name in ("norm", "mean_norm"):
            expected, actual = getattr(reference, name), getattr(module, name)
            assert torch.allclose(actual.running_mean, expected.running_mean, rtol=1e-4)
            assert torch.allclose(actual.running_var, expected.running_var, rtol=1e-4)
        assert torch.allclose(module.unnumbered.running_mean, reference.unnumbered.running_mean, rtol=1e-4)


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
def test_weight_averages_are_computed_from_the_newest_weights(every: int) -> None:
    [expected] = averaged(Single(), 1, every_n_steps=every).averages
    for strategy in (AsyncSGD(), AsyncSGD(overlap="forward"), ParameterServer(mode="bounded")):
        module = averaged(strategy, 1, every_n_steps=every)
        assert all(torch.equal(module.averages[0][name], expected[name]) for name in expected), strategy
    module = averaged(ParameterServer(optimizer="server", overlap="forward"), 2, every_n_steps=every)
    assert all(torch.allclose(module.averages[0][name], expected[name], atol=2e-6) for name in expected)
    module = averaged(ParameterServer(mode="bounded", max_staleness=0), 3, every_n_steps=every)
    assert module.updates == 8 // every  # including updates during the computation of other workers
    for other in module.averages[1:]:
        assert all(torch.equal(module.averages[0][name], other[name]) for name in other)


class SkipsSome(Recorded):
    """Returns no loss for the batch that contains sample 7."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if 7 in batch[2].tolist() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
def test_a_batch_without_a_loss_makes_no_update() -> None:
    for accumulate in (1, 2):
        options: Any = {"batch": 4, "accumulate_grad_batches": accumulate}
        expected, alone = train(Single(), 1, module=SkipsSome(), **options)
        module, trainer = train(AsyncSGD(), 1, module=SkipsSome(), **options)
        assert trainer.global_step == alone.global_step == (20 if accumulate == 1 else 12)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True))


class LogsSampleCount(Recorded):
    """Logs the number of its samples; the first gradient of rank 0 is too late."""

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
    expected, alone = train(Single(), 1, module=LogsSampleCount(), batch=4, max_epochs=1)
    module, trainer = train(strategy, 3, module=LogsSampleCount(), batch=4, max_epochs=1)
    assert module.counts[0].dropped > 0
    assert float(trainer.callback_metrics["count"]) == SAMPLES
    assert float(trainer.callback_metrics["first"]) == pytest.approx(float(alone.callback_metrics["first"]), rel=1e-4)
    assert int(module.norm.num_batches_tracked) == int(expected.norm.num_batches_tracked) == 11
