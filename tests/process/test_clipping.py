"""Clipping limits the gradient of an update, whoever steps; hooks see that gradient, or reading it is an error."""

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
Reader = str  # which hook reads gradients


class Clipped(fx.Module):
    """Two optimizers with large steps in float64.

    Args:
        own: clip the gradient of one optimizer by norm, and that of the other by value.
        reads: the hook that reads gradients; "" for none.
    """

    def __init__(self, own: bool = False, reads: Reader = "") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.own, self.reads = own, reads
        self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 1).double()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.second(torch.tanh(self.first(batch[0].double()))) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5) for part in (self.first, self.second)]

    def configure_gradient_clipping(self, optimizer: Any, limit: Any = None, algorithm: Any = None) -> None:
        if self.reads == "configure_gradient_clipping":
            self._read(optimizer)
        if not self.own:
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
STEPPED_ELSEWHERE: dict[str, tuple[Make, int]] = {
    "a server": (lambda: ParameterServer(optimizer="server"), 2),
    "2 servers": (lambda: ParameterServer(optimizer="server", servers=2), 3),
    "one memory": (lambda: ParameterServer(optimizer="server", servers=0), 3),
    "bounded": (lambda: ParameterServer(mode="bounded", max_staleness=0), 3),
}
WAYS: dict[str, tuple[Make, int]] = {
    **STEPPED_ELSEWHERE,
    "ddp": (DDP, 2),
    "fsdp": (FSDP, 2),
    "workers step": (lambda: ParameterServer(servers=2), 2),
    "async, one worker": (AsyncSGD, 1),
}
CLIPPING: dict[str, tuple[bool, dict[str, Any]]] = {
    "norm": (False, {"gradient_clip_val": LIMIT}),
    "value": (False, {"gradient_clip_val": LIMIT / 10, "gradient_clip_algorithm": "value"}),
    "own, accumulated": (True, {"accumulate_grad_batches": 2}),
}


@functools.cache
def alone(own: bool, reads: Reader, options: tuple[tuple[str, Any], ...]) -> Clipped:
    return train("single", 1, Clipped(own, reads), **dict(options))


SHORT = [  # each way, and each way of clipping for servers and for workers that step
    ("a server", "norm"), ("a server", "value"), ("2 servers", "norm"), ("2 servers", "own, accumulated"),
    ("one memory", "norm"), ("bounded", "norm"), ("ddp", "own, accumulated"), ("fsdp", "norm"), ("fsdp", "value"),
    ("workers step", "norm"), ("async, one worker", "own, accumulated"),
]  # fmt: skip
ALL = [(way, clipping) for way in WAYS for clipping in CLIPPING]


@pytest.mark.parametrize(("way", "clipping"), params(SHORT, [case for case in ALL if case not in SHORT]))
def test_the_gradient_of_an_update_is_clipped(way: str, clipping: str) -> None:
    (make, devices), (own, options) = WAYS[way], CLIPPING[clipping]
    wanted = alone(own, "", tuple(options.items()))
    found = train(make(), devices, Clipped(own), **options)
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=1e-10), (name, (a - b).abs().max())  # float64 in another order


class Pulled(fx.Module):
    """Its gradient is far above any limit, and the same for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 100.0 * self.weights.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("strategy", [ParameterServer(backup_workers=1), ParameterServer(mode="bounded")])
def test_an_update_of_some_of_the_workers_is_clipped_as_one(strategy: Any) -> None:
    module = Pulled()
    trainer = fx.Trainer(devices=3, strategy=strategy, max_steps=6, gradient_clip_val=LIMIT, **QUIET)
    trainer.fit(module, DataLoader(layered_data(43), 4))
    moved = float(module.weights.detach().norm())
    assert moved == pytest.approx(6 * LIMIT, rel=1e-4)  # torch adds 1e-6 to a norm


def test_a_norm_in_parts_that_nobody_joins_is_refused() -> None:
    strategy = ParameterServer(mode="bounded", servers=2)
    with pytest.raises(WorkerFailed, match=r"Use servers=1, gradient_clip_algorithm='value', or mode='sync'"):
        train(strategy, 2, Clipped(), gradient_clip_val=LIMIT)
    with pytest.raises(WorkerFailed, match="Use servers=1"):
        train(strategy, 2, Clipped(own=True))


READERS = ("on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping")


READING = [  # each way and each hook
    ("ddp", "on_before_optimizer_step"), ("ddp", "configure_gradient_clipping"), ("fsdp", "on_before_optimizer_step"),
    ("fsdp", "on_after_backward"), ("workers step", "on_after_backward"),
    ("async, one worker", "configure_gradient_clipping"),
]  # fmt: skip
ALL_READING = [(way, reads) for way in ("ddp", "fsdp", "workers step", "async, one worker") for reads in READERS]


@pytest.mark.parametrize(("way", "reads"), params(READING, [case for case in ALL_READING if case not in READING]))
def test_hooks_see_the_gradient_of_the_update(way: str, reads: Reader) -> None:
    make, devices = WAYS[way]
    options = {"gradient_clip_val": LIMIT}
    found = train(make(), devices, Clipped(reads=reads), **options)
    wanted = alone(False, reads, tuple(options.items()))
    assert len(found.norms) == (16 if reads != "on_after_backward" else 8)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-9)


@pytest.mark.parametrize("way", STEPPED_ELSEWHERE)
def test_reading_a_part_of_a_gradient_is_an_error(way: str) -> None:
    make, devices = STEPPED_ELSEWHERE[way]
    reads = READERS[list(STEPPED_ELSEWHERE).index(way) % len(READERS)]
    with pytest.raises(WorkerFailed, match="optimizer=worker"):
        train(make(), devices, Clipped(reads=reads))
