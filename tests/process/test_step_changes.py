"""Steps that change weights, differentiate through the model, or don't step: supported, or refused with the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, ParameterServer, PipelineMesh, TensorMesh
from fabricx.testing import QUIET

pytestmark = pytest.mark.usefixtures("warm_ranks")

GLOBAL_BATCH = 4
CHANGES: dict[str, Any] = {  # changes of a weight, in no_grad
    "row =": lambda weight: weight.__setitem__(0, 0.5),
    "masked": lambda weight: weight.__setitem__(weight > 0.2, 0.2),
    "lerp_": lambda weight: weight.lerp_(torch.ones_like(weight), 0.1),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "out": lambda weight: torch.mul(weight, 0.5, out=weight),
    "normal_": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(4)),
    "kaiming": lambda weight: nn.init.kaiming_uniform_(weight, generator=torch.Generator().manual_seed(4)),
    "eye_": nn.init.eye_,
    "view": lambda weight: weight[0].mul_(0.5),
    "view of data": lambda weight: weight.data.chunk(2)[1].zero_(),
    "set_": lambda weight: weight.set_(weight * 0.5),
    "set_ whole": lambda weight: weight.set_(torch.ones(6, 4, dtype=torch.float64)),
}


class Net(fx.Module):
    """Two layers in float64; variants change the second batch's step, after a trial run of the step.

    Args:
        kind: kind of the change.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.other = nn.Linear(4, 2)
        if kind == "parametrized":
            weight_norm(self.net[0])
            spectral_norm(self.net[2])
        self.double()
        if kind == "compiled":
            self.other = torch.compile(self.other, backend="eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, later = batch[0], self.global_step == 1
        first: Any = self.net[0]
        if (self.kind == "data.mul_" and later) or self.kind == "data.mul_ always":
            first.weight.data.mul_(0.5)
        if self.kind == "data =" and later:
            first.weight.data = first.weight.data * 0.5
        if self.kind == "parameter" and later:
            first.weight = nn.Parameter(first.weight.detach() * 0.5)
        if self.kind == "layer" and later:
            self.net[0] = nn.Linear(4, 6).double()
        if self.kind == "requires_grad" and later:
            first.weight.requires_grad = False
        if self.kind in CHANGES and later:
            with torch.no_grad():
                CHANGES[self.kind](first.weight)
        outputs = self.net(inputs.requires_grad_(self.kind == "penalty"))
        if self.kind == "branch" and later:
            outputs = outputs + self.other(inputs)
        loss = (outputs - batch[1]).square().mean()
        if self.kind == "penalty":
            gradient: Tensor = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
            loss = loss + gradient.square().sum(1).mean()
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.kind == "skips" and batch_idx == 1:
            closure()
        else:
            optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        if self.kind == "Adafactor":
            return torch.optim.Adafactor(self.parameters())
        return (
            AllStep(self.parameters(), 0.1) if self.kind == "no gradient" else torch.optim.SGD(self.parameters(), 0.1)
        )


class AllStep(torch.optim.SGD):
    """Also changes parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)
        return super().step(closure)


def train(kind: str, strategy: Any = "auto", devices: int = 1, data_ranks: int = 1) -> dict[str, Tensor]:
    """Return the weights after two epochs of three global batches."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(12, columns, generator=generator, dtype=torch.float64) for columns in (4, 2)]
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, **QUIET)
    module = Net(kind)
    trainer.fit(module, DataLoader(TensorDataset(*data), GLOBAL_BATCH // data_ranks))
    return module.state_dict()


@pytest.mark.parametrize(
    ("strategy", "kinds", "message"),
    [
        (FSDP(), ["data =", "parameter"], r"net\.0\.weight was changed or replaced while strategy=fsdp had gathered"),
        (FSDP(), ["Adafactor"], r"Adafactor computes with parameters in a way .* strategy=ddp"),
        (DDP(), ["set_"], r"strategy=ddp lacks the gradient of a parameter .* weight\.copy_\(new\)"),
        (
            ParameterServer(optimizer="server"), ["data.mul_", "data ="],
            r"training_step changes net\.0\.weight, but servers hold the weights",
        ),
        (ParameterServer(optimizer="server"), ["skips"], "calls the step of SGD 0 times for this batch, but servers"),
        (
            PipelineMesh(), ["data.mul_ always", "data =", "parameter"],
            r"training_step changes net\.0\.weight, and ranks hold parts of the module",
        ),
        (PipelineMesh(), ["compiled"], "other is compiled, and pipeline parallelism does not support torch.compile"),
        (PipelineMesh(), ["data.mul_"], "the step changes or uses a parameter that this stage of the pipe"),
        (PipelineMesh(), ["branch"], r"other\.\w+: the step changes or uses a parameter that this stage"),
        (PipelineMesh(), ["penalty"], "differentiates through the model, .* use strategy=ddp or strategy=fsdp"),
        (PipelineMesh(), ["no gradient"], "AllStep steps parameters without a gradient, also those that other stages"),
        (TensorMesh(), ["view", "view of data"], r"changes a view of net\.0\.weight, .* or `weight\.copy_\(new\)`"),
        (TensorMesh(), ["set_ whole"], r"net\.0\.weight is divided over .* replaced it or its memory .*copy_\(new\)"),
        (TensorMesh(), ["layer"], r"net\.0 is divided over .* replaced this module by another"),
        (TensorMesh(), ["set_"], r"set_ was called with a tensor .*: change a weight by weight\.copy_\(new\)"),
        (TensorMesh(), ["parameter"], "requires_grad_ was called .* make parameters in __init__ or configure_model"),
        (TensorMesh(), ["data.mul_ always"], r"training_step changes net\.0\.weight, and ranks hold parts of the"),
    ],
)  # fmt: skip
def test_changes_in_steps_that_would_be_lost_or_repeated_are_refused(
    strategy: Any, kinds: list[str], message: str
) -> None:
    data_ranks = 1 if isinstance(strategy, (PipelineMesh, TensorMesh)) else 2
    for kind in kinds:
        with pytest.raises(WorkerFailed, match=message):
            train(kind, copy.copy(strategy), 2, data_ranks)


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        ("data.mul_", [DDP(), TensorMesh()]),
        *((kind, [TensorMesh()]) for kind in ("data =", "requires_grad", *list(CHANGES)[:8])),
        ("penalty", [DDP(), FSDP()]),
        ("skips", [DDP(), FSDP(), ParameterServer()]),
        ("parametrized", [DDP(), FSDP(), ParameterServer(optimizer="server"), TensorMesh()]),
    ],
)
def test_supported_changes_in_steps_train_the_weights_of_a_single_process(kind: str, strategies: list[Any]) -> None:
    expected = train(kind)
    for strategy in strategies:
        data_ranks = 1 if isinstance(strategy, TensorMesh) else 2
        for name, weight in train(kind, strategy, 2, data_ranks).items():
            # float64; spectral norms iterate on each rank per batch, as in a single process
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9), (kind, strategy, name)
