"""SyncBatchNorm: statistics over the samples of all ranks are equal to statistics of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import LoadBalancer
from fabricx.distributed import world
from fabricx.distributed.statistics.sync_batchnorm import SyncBatchNorm, synchronise
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, ParameterServer
from fabricx.testing import QUIET, Ledger, kill, run_ranks
from tests.soak import params

from .ledgers import Numbered

pytestmark = pytest.mark.usefixtures("warm_ranks")

SAMPLES, BATCH, EPOCHS = 48, 12, 2


class Normalised(Ledger):
    """Normalizes its inputs by the statistics of the global batch."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        inputs = Numbered(1)[0][0].shape[-1]
        self.norm = nn.BatchNorm1d(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.norm(batch[0]), *batch[1:]), batch_idx)


def train(strategy: Any, tmp_path: Path, *callbacks: Any, devices: int = 3, **options: Any) -> Normalised:
    torch.manual_seed(3)
    module = Normalised()
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=EPOCHS, default_root_dir=tmp_path, callbacks=list(callbacks),
        sync_batchnorm=True, **{**QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(SAMPLES), BATCH // devices, shuffle=True))
    return module


CASES: dict[str, tuple[Any, list[Any]]] = {
    "ddp": (DDP(), []),
    "fsdp": (FSDP(), []),
    "parameter_server": (ParameterServer(), []),
    "other shares": (DDP(), [LoadBalancer(shares=[0.6, 0.3, 0.1])]),
    "other shares, sharded": (FSDP(), [LoadBalancer(shares=[0.6, 0.3, 0.1])]),
    "a worker is killed": (DDP(), [kill(rank=1).during("backward", step=3), fx.callbacks.FaultRecovery()]),
}


@pytest.mark.parametrize(
    "case",
    params([case for case in CASES if case not in ("ddp", "fsdp")], ["ddp", "fsdp"]),  # equal shares
)
def test_ranks_train_the_weights_and_statistics_of_a_single_process(case: str, tmp_path: Path) -> None:
    strategy, callbacks = CASES[case]
    parallel, single = train(strategy, tmp_path / "a", *callbacks), train("auto", tmp_path / "b", devices=1)
    for (name, a), b in zip(parallel.state_dict().items(), single.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)  # float32 sums in a different order
    assert float((parallel.entries.detach() + EPOCHS).abs().max()) < 1e-4


def _normalize_part(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return outputs, both gradients and the running variance of this rank's part of a batch."""
    this_world = world.current()
    assert this_world is not None
    begin, end = [(0, 5), (5, 6)][this_world.rank]
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))[begin:end].to(dtype).requires_grad_()
    block = nn.Sequential(nn.BatchNorm2d(shape[1], momentum=None))
    synchronise(block, torch.device("cpu"))
    block[0].track_running_stats = False
    block(inputs)
    assert block[0].running_mean.tolist() == [0.0] * shape[1]  # type: ignore[union-attr, operator]
    block[0].track_running_stats = True
    output = block(inputs)
    output.float().pow(3).sum().backward()
    block.eval()
    with torch.no_grad():
        block(inputs)  # needs no other rank
    [norm] = block
    assert inputs.grad is not None
    return output.detach(), inputs.grad, norm.weight.grad, norm.running_var


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_parts_of_any_size_are_normalized_by_the_statistics_of_the_whole_batch(dtype: torch.dtype, near: float) -> None:
    shape = (6, 3, 4, 5)
    parts = run_ranks(_normalize_part, 2, shape, dtype)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    norm = nn.BatchNorm2d(3, momentum=None)
    output = norm(inputs)
    output.float().pow(3).sum().backward()
    assert inputs.grad is not None
    assert norm.weight.grad is not None
    assert parts[0][0].dtype is dtype
    for number, expected in enumerate((output.detach(), inputs.grad)):
        torch.testing.assert_close(torch.cat([part[number] for part in parts]), expected, atol=near, rtol=near)
    gradient: Any = sum(part[2] for part in parts)
    torch.testing.assert_close(gradient, norm.weight.grad, atol=10 * near, rtol=near)
    for part in parts:
        torch.testing.assert_close(part[3], norm.running_var, atol=near, rtol=near)


def _gathered() -> tuple[Tensor, Tensor | None]:
    this_world = world.current()
    assert this_world is not None
    tensor = torch.tensor([1.0 + this_world.rank, 5.0]).requires_grad_()
    gathered = this_world.all_gather(tensor, sync_grads=True)
    ((this_world.rank + 1) * gathered * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    return gathered.detach(), tensor.grad


def test_gradients_flow_through_all_gather() -> None:
    first, second = run_ranks(_gathered, 2)
    assert first[0].tolist() == second[0].tolist() == [[1.0, 5.0], [2.0, 5.0]]
    # The losses of both ranks, with factors 1 and 2.
    assert (first[1].tolist(), second[1].tolist()) == ([3.0, 6.0], [9.0, 12.0])


def _error_of_a_single_value() -> str:
    block = nn.Sequential(nn.BatchNorm1d(2))
    synchronise(block, torch.device("cpu"))
    try:
        block(torch.ones(1 if world.current().main_rank else 0, 2))  # type: ignore[union-attr]
    except ValueError as error:
        return str(error)
    return ""


def test_a_single_value_per_channel_is_an_error_on_all_ranks() -> None:
    assert all("more than one value per channel" in message for message in run_ranks(_error_of_a_single_value, 2))


def test_a_single_rank_normalizes_as_plain_batch_norm() -> None:
    module, plain = nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)
    synchronise(module, torch.device("cpu"))
    inputs = torch.randn(4, 2)
    assert isinstance(module[0], SyncBatchNorm)
    assert torch.equal(module(inputs), plain(inputs))
    assert torch.equal(module[0].running_var, plain.running_var)


class SkipsLoss(Normalised):
    """Rank 1 returns no loss for batch 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 2 else loss


class Endless:
    def __iter__(self) -> Any:
        raise AssertionError("it is read, but should be refused")


def test_batches_that_leave_a_rank_without_samples_are_refused(tmp_path: Path) -> None:
    options: Any = {**QUIET, "max_epochs": 1, "sync_batchnorm": True, "default_root_dir": tmp_path, "devices": 2}
    with pytest.raises(WorkerFailed, match="drop_last=True"):
        fx.Trainer(**options).fit(Normalised(), DataLoader(Numbered(13), 6))
    fx.Trainer(**options).fit(Normalised(), DataLoader(Numbered(13), 6, drop_last=True))
    with pytest.raises(WorkerFailed, match="rank 1 returned no loss, and SyncBatchNorm needs all ranks"):
        fx.Trainer(**options).fit(SkipsLoss(), DataLoader(Numbered(48), 6))
    with pytest.raises(WorkerFailed, match="limit_train_batches"):
        fx.Trainer(**options).fit(Normalised(), Endless())
    for more in ({"accumulate_grad_batches": 2}, {}):
        balancer = LoadBalancer(max_batch_size=None if more else 4)
        with pytest.raises(ValueError, match="SyncBatchNorm normalises the samples that ranks compute at a time"):
            fx.Trainer(**options, **more, callbacks=[balancer]).fit(Normalised(), DataLoader(Numbered(48), 6))


def test_converting_a_module_twice_keeps_its_layers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(3)))
    synchronise(model, torch.device("cpu"))
    first = list(model.modules())
    synchronise(model, torch.device("cpu"))
    assert all(part_after is part_before for part_after, part_before in zip(model.modules(), first, strict=True))
    assert sum(isinstance(part, SyncBatchNorm) for part in first) == 2
