"""Unsupported options, modules and changes of weights with servers are refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, LayeredModule, run_ranks
from tests.process.served import Recorded, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Gathers(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            dist.all_reduce(torch.zeros(1))
        return super().training_step(batch, batch_idx)


def test_a_collective_in_a_step_is_refused_at_once() -> None:
    with pytest.raises(WorkerFailed, match="each rank takes its batches at its own pace"):
        train(AsyncSGD(), module=Gathers())


class SkipsTheRest(Recorded):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class With(Recorded):
    """Has an additional part."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part


@pytest.mark.parametrize(
    ("strategy", "module", "message"),
    [
        (AsyncSGD(), SkipsTheRest(), "set trainer.should_stop"),
        (AsyncSGD(), With(nn.SyncBatchNorm(6)), "SyncBatchNorm needs all ranks"),
        (AsyncSGD(), LayeredModule(manual=True), "a manually optimised module steps by itself"),
        (ParameterServer(optimizer="server"), LayeredModule(manual=True), "optimizer=worker"),
    ],
)
def test_unsupported_modules_are_refused(strategy: Any, module: Any, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        train(strategy, module=module)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(WorkerFailed, match="view_as_real"):
        train(ParameterServer(), module=With(nn.Parameter(torch.zeros(2, dtype=torch.complex64))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParameterServer(mode="asink"), "Did you mean 'async'"),
        (lambda: ParameterServer(servers=-1), "servers=-1"),
        (lambda: ParameterServer(servers=0, mode="async"), "servers=0"),
        (lambda: AsyncSGD(servers=0), "servers=0"),
        (lambda: ParameterServer(backup_workers=1, servers=2), "backup_workers=1"),
        (lambda: ParameterServer(overlap="forwards"), "Did you mean 'forward'"),
        (lambda: ParameterServer(overlap="forward"), "needs servers that step"),
        (lambda: ParameterServer(compression="powersdg"), "Did you mean 'powersgd'"),
        (lambda: ParameterServer(compression="powersgd", optimizer="server"), "all workers in each update"),
        (lambda: ParameterServer(compression="topk", compression_keep=0.6), "at most 0.5"),
        (lambda: ParameterServer(backup_workers=1, mode="async"), "backup_workers=1"),
        (lambda: AsyncSGD(max_staleness=-1), "max_staleness=-1"),
        (
            lambda: AsyncSGD(elastic_rate=0.5),
            "elastic_rate=0.5: must be more than 0 and at most 1, with outer='elastic'",
        ),
        (lambda: AsyncSGD(outer="elastic", elastic_rate=-1.0), "elastic_rate=-1.0"),
        (lambda: AsyncSGD(dc_lambda=0.5), "dc_lambda=0.5: must be more than 0, with compensation='dc'"),
        (lambda: AsyncSGD(compensation="dc-adaptive", dc_momentum=2.0), "dc_momentum=2.0: must be at least 0"),
        (lambda: AsyncSGD(every=2, outer="nesterov", outer_momentum=1.5), "outer_momentum=1.5"),
        (lambda: AsyncSGD(compensation="dc-adaptiv"), "Did you mean 'dc-adaptive'"),
        (lambda: AsyncSGD(on_stale="drop", servers=2), "servers=1"),
        (lambda: AsyncSGD(on_stale="drop"), "set max_staleness"),
        (lambda: AsyncSGD(on_stale="damp", max_staleness=1, bound="clock"), "bound='version'"),
        (lambda: DDP(powersgd_rank=0), "powersgd_rank=0"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_update_needs_a_worker_beside_the_backup_workers() -> None:
    with pytest.raises(WorkerFailed, match=r"backup_workers=1 of 1 workers.*or more devices"):
        train(ParameterServer(backup_workers=1), 1, max_epochs=1)


def fit_in_a_joined_world() -> list[str]:
    refusals = []
    for strategy in (AsyncSGD(), ParameterServer(servers=1), ParameterServer(servers=2, mode="bounded")):
        trainer = fx.Trainer(strategy=strategy, max_epochs=1, **QUIET)
        with pytest.raises(ValueError, match="needs server processes") as refused:
            trainer.fit(LayeredModule(), [])
        refusals.append(str(refused.value))
    return refusals


def test_strategies_with_servers_are_refused_in_a_manually_joined_world() -> None:
    first, second = run_ranks(fit_in_a_joined_world, 2)
    assert first == second
    assert all("call fit outside of that world" in text for text in first)


class Clamps(Recorded):
    """Limits weights in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", params([AsyncSGD()], [ParameterServer(optimizer="server")]))
def test_weight_changes_in_training_step_are_refused_if_servers_hold_the_weights(strategy: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"training_step changes head\.weight, but servers hold the weights"):
        train(strategy, module=Clamps())


class ClampsInStep(Recorded):
    """Limits weights after each step of the optimizer, as some adversarial networks do."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        self.head.weight.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("servers", params([0], [1]))
def test_weight_changes_in_optimizer_step_are_refused_if_servers_hold_the_weights(servers: int) -> None:
    strategy = ParameterServer(servers=servers, optimizer="server")
    with pytest.raises(WorkerFailed, match=r"optimizer_step changes weights, but servers hold the weights"):
        train(strategy, module=ClampsInStep())


def test_weight_changes_in_training_step_are_kept_if_workers_step() -> None:
    expected, _ = train(Single(), 1, module=Clamps())
    module, _ = train(ParameterServer(), 2, module=Clamps(), batch=6)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=1e-6)
