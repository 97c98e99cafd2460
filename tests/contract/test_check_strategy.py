"""`fabricx.testing.check_strategy` accepts strategies that keep the contract, and names promises that others break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fabricx as fx
from examples.plain_ddp import PlainDDP
from examples.quantized_ddp import QuantizedDDP
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, LocalSGD
from fabricx.testing import BrokenContract, check_strategy

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROUNDING = 0.05  # of gradients of 8 bits, over 12 steps


def test_ddp_and_fsdp_keep_the_contract() -> None:
    check_strategy(DDP)
    check_strategy(FSDP)


def test_the_examples_of_the_guide_keep_the_contract() -> None:
    check_strategy(PlainDDP)
    check_strategy(QuantizedDDP, ranks=3, tolerance=ROUNDING)


class Summed(QuantizedDDP):
    """Sums losses that the loop has multiplied by the number of ranks."""

    traits = fx.Traits(unreplicated=True, averages=True)


class Divergent(QuantizedDDP):
    """Never reduces gradients."""

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        return True


class Forgetful(QuantizedDDP):
    """Saves no error feedback."""

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return fx.Strategy.state_dict(self, module, optimizers)


class Eager(QuantizedDDP):
    """Reduces gradients after each microbatch, so that it adds the sums of earlier microbatches again."""

    def accumulate(self) -> Any:
        return torch.enable_grad()


class Repeated(PlainDDP):
    """Reduces in each backward, so that a second backward adds the sums of the first again."""

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (Summed, "plain: net.0.weight differs by .* Are gradients summed, or averaged"),
        (Eager, "accumulated: net.0.weight differs by"),
        (Repeated, "manual optimization: net.0.weight differs by .* Does the second call reduce"),
        (Forgetful, "resumed: net.0.weight differs by .* Does state_dict contain all state"),
    ],
)
def test_a_broken_promise_is_named(make: Callable[[], fx.Strategy], promise: str) -> None:
    with pytest.raises(BrokenContract, match=promise):
        check_strategy(make, tolerance=ROUNDING)


def test_a_run_whose_ranks_diverge_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="ranks differ after step 4"):
        check_strategy(Divergent)


def test_ranks_with_different_weights_are_not_compared() -> None:
    with pytest.raises(ValueError, match="LocalSGD is not synchronous"):
        check_strategy(LocalSGD)
    with pytest.raises(ValueError, match="ranks=5: must divide 12"):
        check_strategy(DDP, ranks=5)
