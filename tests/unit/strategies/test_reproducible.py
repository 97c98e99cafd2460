"""Integer sums of gradients: the order changes no bit, and gradients that can't be summed are an error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.distributed.world import World
from fabricx.strategies import Reproducible, Single
from fabricx.strategies.reproducible import HEADROOM, IntegerSums
from fabricx.testing import QUIET, TinyModule, tiny_loader

PARTS = 12


def summed(sums: IntegerSums, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        sums.add()
        assert parameter.grad is None
    sums.join(World())
    sums.follow()
    assert parameter.grad is not None
    return parameter.grad


def test_the_order_changes_no_bit_and_the_sum_is_right() -> None:
    parameter = nn.Parameter(torch.zeros(500))
    size = torch.logspace(-12, 3, 500)
    for seed in range(5):
        random.seed(seed)
        gradients = [
            torch.randn(500, generator=torch.Generator().manual_seed(100 * seed + n)) * size for n in range(PARTS)
        ]
        results = []
        for _ in range(3):
            random.shuffle(gradients)
            sums = IntegerSums([parameter], PARTS)
            sums.exponents.fill_(12)
            results.append(summed(sums, parameter, gradients))
            parameter.grad = None
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        exact = torch.stack(gradients).double().sum(0)
        bound = 2.0 ** (12 + HEADROOM + 4 - 62) * PARTS
        assert bool(((results[0].double() - exact).abs() <= bound + exact.abs() * 2.0**-24).all())


def test_the_grid_follows_the_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    sums = IntegerSums([parameter], PARTS)
    for step in range(10):
        size = 2.0 ** (-12 * step)
        total = summed(sums, parameter, [torch.tensor([size, size * 2.0**-20])] * PARTS)
        assert total.tolist() == [PARTS * size, PARTS * size * 2.0**-20]


@pytest.mark.parametrize("exponent", [-60, -1, 40])
def test_the_first_grid_is_determined_by_the_first_part(exponent: int) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(1))]
    sums, size = IntegerSums(parameters, PARTS), 2.0**exponent
    for part in range(PARTS):
        parameters[0].grad = torch.tensor([size, size * 2.0**-20])
        parameters[1].grad = torch.zeros(0)
        parameters[2].grad = torch.tensor([1.0]) if part else None
        sums.measure(World())
        sums.add()
    sums.join(World())
    assert parameters[0].grad.tolist() == [PARTS * size, PARTS * size * 2.0**-20]
    assert parameters[2].grad.tolist() == [PARTS - 1]


def test_a_gradient_that_has_grown_too_much_is_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    sums = IntegerSums([parameter], PARTS)
    assert summed(sums, parameter, [torch.full((2,), 2.0**HEADROOM)])[0] == 2.0**HEADROOM
    sums.exponents.zero_()
    with pytest.raises(FloatingPointError, match="can't be summed exactly"):
        summed(sums, parameter, [torch.full((2,), 2.0 ** (HEADROOM + 1))])


def test_more_gradients_than_parts_do_not_exceed_the_integers() -> None:
    """Accumulation of 16 batches of 12 parts: 2**58 times 192 is above 2**63."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    sums = IntegerSums([parameter], PARTS)
    total = summed(sums, parameter, [torch.full((2,), 2.0**12, dtype=torch.float64)] * 16 * PARTS)
    assert total.tolist() == [2.0**12 * 16 * PARTS] * 2
    sums.exponents.zero_()
    with pytest.raises(FloatingPointError, match=r"more than 2\*\*12 times .* 192 can.t"):
        summed(sums, parameter, [torch.full((2,), 2.0**15, dtype=torch.float64)] * 16 * PARTS)


def test_sums_that_are_repeated_before_their_update_have_the_same_bits() -> None:
    """A rank may die between the sum of the gradients and that of `batch_weight`: all ranks repeat the batch."""
    parameter = nn.Parameter(torch.zeros(500, dtype=torch.float64))
    sums = IntegerSums([parameter], PARTS)
    gradient = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    summed(sums, parameter, [gradient])
    results = []
    for _ in range(2):
        parameter.grad = gradient * 2.0**10 / 3
        sums.add()
        sums.join(World())
        results.append(parameter.grad)
        sums.clear()
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_gradients_stay_non_finite(bad: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    sums = IntegerSums(parameters, PARTS)
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, bad]), torch.ones(2)
    sums.add()
    sums.join(World())
    assert bool(parameters[0].grad.isnan().all())
    assert parameters[1].grad.tolist() == [1.0, 1.0]
    assert parameters[2].grad is None  # no rank had a gradient


class _Changes(TinyModule):
    """Changes the value named by `where`: a parameter that isn't trained, or a buffer."""

    def __init__(self, where: str, *, persistent: bool = True) -> None:
        super().__init__()
        self.where, self.numbers = where, []
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.teacher = nn.Parameter(torch.zeros(()), requires_grad=False)

    def _change(self, here: str) -> None:
        if here == self.where:
            self.teacher.data += 1
        elif f"{here} buffer" == self.where:
            self.seen = self.seen + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.numbers.append(batch_idx)
        self._change("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._change("on_train_batch_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._change("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self._change("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._change("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._change("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self._change("on_train_epoch_end")


def _trained(module: _Changes) -> _Changes:
    trainer = fx.Trainer(max_epochs=1, devices=1, deterministic="elastic", **QUIET)
    trainer.fit(module, tiny_loader(8, 4))
    return module


@pytest.mark.parametrize(
    "where",
    [
        "training_step", "training_step buffer", "on_train_batch_start", "on_before_zero_grad", "on_after_backward",
        "on_train_batch_end", "on_train_batch_end buffer",
    ],
)  # fmt: skip
def test_values_that_each_part_changes_are_refused(where: str) -> None:
    """The number of changes, and with it a moving average or a power iteration, depends on the number of ranks."""
    module = _Changes(where)
    name = "seen" if where.endswith("buffer") else "teacher"
    with pytest.raises(ValueError, match=rf"{name} was changed between the parts of a global batch"):
        _trained(module)
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("where", ["on_before_optimizer_step", "on_before_optimizer_step buffer"])
def test_buffers_changed_by_each_update_are_kept(where: str) -> None:
    module = _trained(_Changes(where))
    assert float(module.seen if where.endswith("buffer") else module.teacher) == 2.0
    assert float(_trained(_Changes("on_train_epoch_end")).teacher) == 1.0


def test_buffers_that_no_checkpoint_has_may_be_filled_by_a_step() -> None:
    """For example tables of positions, which are extended for the longest sequence."""
    assert float(_trained(_Changes("training_step buffer", persistent=False)).seen) == 8.0


def test_an_aborted_window_is_in_no_sum() -> None:
    class Skips(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    modules = []
    for strategy in (Single(), Reproducible(parts=2)):
        modules.append(Skips())
        trainer = fx.Trainer(max_epochs=2, devices=1, strategy=strategy, accumulate_grad_batches=2, **QUIET)
        trainer.fit(modules[-1], tiny_loader())
        assert trainer.global_step == 3
    single, parts = (module.layer.weight for module in modules)
    assert torch.allclose(parts, single, rtol=1e-5)  # float32 sums in another order


def test_the_first_part_is_batch_0_with_fewer_samples_than_parts() -> None:
    assert _trained(_Changes("none")).numbers == list(range(8))
