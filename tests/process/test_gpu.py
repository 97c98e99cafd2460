"""Behaviour that only a GPU has; the same code runs on gloo and CPU in other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.strategies import AsyncSGD, ParameterServer
from fabricx.testing import QUIET, Ledger, TinyModule, kill, tiny_loader

from .ledgers import Numbered

GPUS = torch.cuda.device_count()
ON_GPU = {**QUIET, "accelerator": "gpu"}
one_gpu = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device, and this machine has none")
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and this machine has {GPUS}")

pytestmark = pytest.mark.gpu


class Overflows(TinyModule):
    """Its gradients overflow at a single step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weights.append(self.layer.weight.detach().clone())
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == self.at else loss


@one_gpu
def test_16_mixed_skips_a_step_with_overflowing_gradients_and_continues() -> None:
    module = Overflows(at=2)
    fx.Trainer(max_steps=6, precision="16-mixed", **ON_GPU).fit(module, tiny_loader(32))
    before, after, last = module.weights[2], module.weights[3], module.weights[5]
    assert torch.equal(before, after)
    assert not torch.equal(after, last)
    assert torch.isfinite(last).all()


@one_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_weights_trained_on_a_gpu_equal_those_trained_on_the_cpu(precision: str) -> None:
    on_cpu, on_gpu = TinyModule(), TinyModule()
    fx.Trainer(max_steps=4, **QUIET).fit(on_cpu, tiny_loader())
    fx.Trainer(max_steps=4, precision=precision, **ON_GPU).fit(on_gpu, tiny_loader())
    # precision of a step's products: 8 bits of mantissa in bfloat16, 11 in float16
    tolerance = {"32-true": 1e-5, "bf16-mixed": 3e-2, "16-mixed": 4e-3}[precision]
    assert torch.allclose(on_gpu.layer.weight.cpu(), on_cpu.layer.weight, atol=tolerance)


class Normalised(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(self.norm(inputs))
        return output


@two_gpus
def test_two_gpus_over_nccl_with_synchronized_batch_norm_train_the_weights_of_a_single_gpu() -> None:
    alone, together = Normalised(), Normalised()
    fx.Trainer(max_epochs=1, devices=1, **ON_GPU).fit(alone, tiny_loader(16, 8))
    fx.Trainer(max_epochs=1, devices=2, strategy="ddp", sync_batchnorm=True, **ON_GPU).fit(together, tiny_loader(16, 4))
    for name, tensor in alone.state_dict().items():
        assert torch.allclose(together.state_dict()[name].cpu(), tensor.cpu(), atol=1e-5), name


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_worker_on_a_gpu_that_dies_is_replaced_in_place(strategy: str, tmp_path: Path) -> None:
    modules = []
    for name, faults in (("a", []), ("b", [kill(rank=1).during("backward", step=3)])):
        torch.manual_seed(3)
        module = Ledger(16, 4)
        trainer = fx.Trainer(
            max_epochs=3, devices=2, strategy=strategy, callbacks=[*faults, FaultRecovery()],
            default_root_dir=tmp_path / name, **ON_GPU,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Numbered(16), 2))
        assert len(trainer.failures) == len(faults)
        assert trainer.state.attempt == 0  # no restart
        modules.append(module)
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@one_gpu
@pytest.mark.parametrize("make", [ParameterServer, lambda: ParameterServer(optimizer="server"), AsyncSGD])
def test_a_worker_on_a_gpu_sends_its_gradients_to_servers_in_main_memory(make: Any) -> None:
    alone, served = TinyModule(), TinyModule()
    fx.Trainer(max_epochs=2, **ON_GPU).fit(alone, tiny_loader())
    fx.Trainer(max_epochs=2, devices=1, strategy=make(), **ON_GPU).fit(served, tiny_loader())
    assert torch.allclose(served.layer.weight.cpu(), alone.layer.weight.cpu(), atol=1e-6)
