"""Servers run the user's optimizers: with whole matrices, their own attributes, and later parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, LayeredModule, SavesAtEnd, TinyModule, tiny_loader
from tests.process.served import Recorded, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


class ByTensor(LayeredModule):
    """Trained by optimizers that compute on whole matrices."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        if self.kind == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.02)
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


@pytest.mark.parametrize(("kind", "servers"), params([("adafactor", 0), ("muon", 2)], [("adafactor", 2), ("muon", 0)]))
def test_servers_pass_whole_matrices_to_optimizers_that_need_them(kind: str, servers: int, tmp_path: Path) -> None:
    expected, _ = train(Single(), 1, module=ByTensor(kind), batch=12)
    saver = SavesAtEnd(tmp_path / "end.ckpt")
    strategy = ParameterServer(optimizer="server", servers=servers)
    module, _ = train(strategy, 2, module=ByTensor(kind), batch=6, callbacks=[saver])
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        # Muon computes in bfloat16.
        assert torch.allclose(a, b, atol=2e-3 if kind == "muon" else 1e-5), (a - b).abs().max()
    train(strategy, 2, module=ByTensor(kind), batch=6, ckpt=tmp_path / "end.ckpt", max_epochs=3)


class Warms(torch.optim.Adam):
    """Adam with an argument, a counter, and its own state; saves the counter."""

    def __init__(self, params: Any, lr: float, *, warmup: int) -> None:
        super().__init__(params, lr=lr)
        self.warmup, self.calls = warmup, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        before = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= min(1.0, self.calls / self.warmup)
        super().step(closure)
        for group, rate in zip(self.param_groups, before, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                seen = self.state[parameter].setdefault("seen", torch.zeros_like(parameter))
                seen.add_(parameter.detach())

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]


class Warmed(Recorded):
    def configure_optimizers(self) -> Any:
        return Warms(self.parameters(), lr=0.02, warmup=6)


class Unfreezes(LayeredModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.02)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            others = [p for name, p in self.named_parameters() if not name.startswith("head")]
            self.trainer.optimizers[0].add_param_group({"params": others})


@pytest.mark.parametrize(
    ("strategy", "devices"),
    params(
        [(ParameterServer(optimizer="server"), 2), (AsyncSGD(servers=2, shard_by="element"), 1)],
        [(ParameterServer(optimizer="server", servers=0, shard_by="element"), 2)],
    ),
)
def test_a_users_optimizer_on_servers_keeps_its_attributes(strategy: Any, devices: int, tmp_path: Path) -> None:
    expected, _ = train(Single(), 1, module=Warmed(), batch=12)
    saver = SavesAtEnd(tmp_path / "end.ckpt")
    train(strategy, devices, module=Warmed(), batch=12 // devices, callbacks=[saver], max_epochs=1)
    module, _ = train(strategy, devices, module=Warmed(), batch=12 // devices, ckpt=tmp_path / "end.ckpt")
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()  # sums in a different order, through Adam


@pytest.mark.parametrize(
    "strategy", params([AsyncSGD(), ParameterServer(optimizer="server", servers=0)], [ParameterServer()])
)
def test_parameters_that_are_added_to_an_optimizer_in_training_are_refused(strategy: Any) -> None:
    with pytest.raises(WorkerFailed, match=r"had 2 parameters when training began and have \d+ now"):
        train(strategy, module=Unfreezes())


@pytest.mark.parametrize(
    "strategy", params([ParameterServer(servers=1, optimizer="server")], [AsyncSGD(), ParameterServer(mode="bounded")])
)
def test_low_precision_weights_that_servers_would_store_in_float32_are_refused(strategy: fx.Strategy) -> None:
    """Regression: checkpoints were rounded, so that a run differed after a resume or a death."""
    trainer = fx.Trainer(devices=2, strategy=strategy, precision="bf16-true", max_epochs=1, **QUIET)
    with pytest.raises(WorkerFailed, match=r"store the weights as torch\.float32, and the module has torch\.bfloat16"):
        trainer.fit(TinyModule(), tiny_loader())
