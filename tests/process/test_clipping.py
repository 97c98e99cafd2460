"""Clipping limits the gradient of an update, on workers or servers; hooks see that gradient, or reading it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, AsyncSGD, ParameterServer
from fabricx.testing import QUIET, layered_data
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

LIMIT = 0.05
Reader = str  # the hook that reads gradients


class Clipped(fx.Module):
    """Two optimizers with large steps in float64.

    Args:
        clips: clip the gradient of one optimizer by norm, and that of the other by value.
        reads: the hook that reads gradients; "" for no hook.
    """

    def __init__(self, clips: bool = False, reads: Reader = "") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.clips, self.reads = clips, reads
        self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 1).double()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.second(torch.tanh(self.first(batch[0].double()))) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5) for part in (self.first, self.second)]

    def configure_gradient_clipping(self, optimizer: Any, limit: Any = None, algorithm: Any = None) -> None:
        if self.reads == "configure_gradient_clipping":
            self._read(optimizer)
        if not self.clips:
            self.clip_gradients(optimizer, limit, algorithm)
        elif optimizer is self.trainer.optimizers[0]:
            self.clip_gradients(optimizer, LIMIT, "norm")
        else:
            self.clip_gradients(optimizer, LIMIT / 10, "value")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.reads == "on_before_optimizer_step":
            self._read(optimizer)

    def on_after_backward(self) -> None:
        if self.reads == "on_after_backward":
            self._read(self.trainer.optimizers[0])

    def _read(self, optimizer: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norm: Any = nn.utils.get_total_norm(gradients)
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def train(strategy: Any, devices: int, module: Clipped, **options: Any) -> Clipped:
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    trainer.fit(module, DataLoader(layered_data(43), 12 // devices, shuffle=True))
    return module


Make = Callable[[], fx.Strategy]
ON_SERVERS: dict[str, tuple[Make, int]] = {
    "a server": (lambda: ParameterServer(optimizer="server"), 2),
    "2 servers": (lambda: ParameterServer(optimizer="server", servers=2), 3),
    "shared memory": (lambda: ParameterServer(optimizer="server", servers=0), 3),
    "bounded": (lambda: ParameterServer(mode="bounded", max_staleness=0), 3),
}
STRATEGIES: dict[str, tuple[Make, int]] = {
    **ON_SERVERS,
    "ddp": (DDP, 2),
    "fsdp": (FSDP, 2),
    "optimizer on workers": (lambda: ParameterServer(servers=2), 2),
    "async, 1 worker": (AsyncSGD, 1),
}
CLIPPING: dict[str, tuple[bool, dict[str, Any]]] = {
    "norm": (False, {"gradient_clip_val": LIMIT}),
    "value": (False, {"gradient_clip_val": LIMIT / 10, "gradient_clip_algorithm": "value"}),
    "in the hook, accumulated": (True, {"accumulate_grad_batches": 2}),
}


@functools.cache
def alone(clips: bool, reads: Reader, options: tuple[tuple[str, Any], ...]) -> Clipped:
    return train("single", 1, Clipped(clips, reads), **dict(options))


SHORT = [  # each strategy; each kind of clipping for optimizers on servers and on workers
    ("a server", "norm"), ("a server", "value"), ("2 servers", "norm"), ("2 servers", "in the hook, accumulated"),
    ("shared memory", "norm"), ("bounded", "norm"),
    ("ddp", "in the hook, accumulated"), ("fsdp", "norm"), ("fsdp", "value"),
    ("optimizer on workers", "norm"), ("async, 1 worker", "in the hook, accumulated"),
]  # fmt: skip
ALL = [(strategy, clipping) for strategy in STRATEGIES for clipping in CLIPPING]


@pytest.mark.parametrize(("strategy", "clipping"), params(SHORT, [case for case in ALL if case not in SHORT]))
def test_the_gradient_of_an_update_is_clipped(strategy: str, clipping: str) -> None:
    (make, devices), (clips, options) = STRATEGIES[strategy], CLIPPING[clipping]
    single = alone(clips, "", tuple(options.items()))
    module = train(make(), devices, Clipped(clips), **options)
    for (name, a), b in zip(module.named_parameters(), single.parameters(), strict=True):
        # float64 sums in a different order.
        assert torch.allclose(a, b, rtol=0.0, atol=1e-10), (name, (a - b).abs().max())


class OneNaN(fx.Module):
    """Two layers with separate losses; only the gradient of the second is NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.finite, self.nan = nn.Linear(6, 5).double(), nn.Linear(6, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].double()
        return self.finite(inputs).pow(2).mean() + (self.nan(inputs) * torch.nan).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("strategy", [*ON_SERVERS, "optimizer on workers", "async, 1 worker"])
def test_a_norm_of_nan_makes_all_clipped_gradients_nan_as_in_one_process(strategy: str) -> None:
    """Regression: on servers, gradients without NaN were not clipped at all, and their weights took a whole step."""
    make, devices = STRATEGIES[strategy]
    module = OneNaN()
    trainer = fx.Trainer(devices=devices, strategy=make(), max_steps=1, gradient_clip_val=LIMIT, **QUIET)
    trainer.fit(module, DataLoader(layered_data(12), 12 // devices))
    assert all(bool(parameter.isnan().all()) for parameter in module.parameters())


class Pulled(fx.Module):
    """A module with a gradient far above any limit, equal for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 100.0 * self.weights.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("strategy", [ParameterServer(backup_workers=1), ParameterServer(mode="bounded")])
def test_the_sum_of_gradients_of_an_update_is_clipped_not_each_gradient(strategy: Any) -> None:
    module = Pulled()
    trainer = fx.Trainer(devices=3, strategy=strategy, max_steps=6, gradient_clip_val=LIMIT, **QUIET)
    trainer.fit(module, DataLoader(layered_data(43), 4))
    moved = float(module.weights.detach().norm())
    assert moved == pytest.approx(6 * LIMIT, rel=1e-4)  # torch adds 1e-6 to a norm


def test_clipping_by_norm_is_refused_if_each_of_several_servers_has_a_part_of_the_gradient() -> None:
    strategy = ParameterServer(mode="bounded", servers=2)
    with pytest.raises(WorkerFailed, match=r"Use servers=1, gradient_clip_algorithm='value', or mode='sync'"):
        train(strategy, 2, Clipped(), gradient_clip_val=LIMIT)
    with pytest.raises(WorkerFailed, match="Use servers=1"):
        train(strategy, 2, Clipped(clips=True))


READERS = ("on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping")


READING = [  # each strategy and each hook
    ("ddp", "on_before_optimizer_step"), ("ddp", "configure_gradient_clipping"), ("fsdp", "on_before_optimizer_step"),
    ("fsdp", "on_after_backward"), ("optimizer on workers", "on_after_backward"),
    ("async, 1 worker", "configure_gradient_clipping"),
]  # fmt: skip
ALL_READING = [
    (strategy, reads) for strategy in ("ddp", "fsdp", "optimizer on workers", "async, 1 worker") for reads in READERS
]


@pytest.mark.parametrize(("strategy", "reads"), params(READING, [case for case in ALL_READING if case not in READING]))
def test_hooks_see_the_gradient_of_the_update(strategy: str, reads: Reader) -> None:
    make, devices = STRATEGIES[strategy]
    options = {"gradient_clip_val": LIMIT}
    module = train(make(), devices, Clipped(reads=reads), **options)
    single = alone(False, reads, tuple(options.items()))
    assert len(module.norms) == (16 if reads != "on_after_backward" else 8)
    assert module.norms == pytest.approx(single.norms, rel=1e-9)


@pytest.mark.parametrize("strategy", ON_SERVERS)
def test_reading_gradients_that_only_servers_have_is_an_error(strategy: str) -> None:
    make, devices = ON_SERVERS[strategy]
    reads = READERS[list(ON_SERVERS).index(strategy) % len(READERS)]
    with pytest.raises(WorkerFailed, match="optimizer=worker"):
        train(make(), devices, Clipped(reads=reads))
