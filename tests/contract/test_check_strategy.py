"""`fabricx.testing.check_strategy` accepts strategies that keep the contract, and names promises that others break."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fabricx as fx
from examples.plain_ddp import PlainDDP
from examples.quantized_ddp import QuantizedDDP
from fabricx.core.strategy_parts import Elastic
from fabricx.distributed.world import World
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, LocalSGD
from fabricx.testing import BrokenContract, check_strategy, strategy_contract
from tests.soak import params

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


class Undeclared(QuantizedDDP, Elastic):
    """Gives the replacement of a dead rank the rounding errors of another rank."""

    traits = fx.Traits(elastic=True)

    def world_changed(self, world: World) -> None:
        self.world = world

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return self.local_state_dict(module, optimizers)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        self.load_local_states([state], module, optimizers, own=True)


class Declared(QuantizedDDP, Elastic):
    """Has an in-memory checkpoint of each rank."""

    traits = fx.Traits(elastic=True, unreplicated=True)

    def world_changed(self, world: World) -> None:
        self.world = world


class Waiting(Undeclared):
    """Calls a collective that the replacement of a dead rank does not call."""

    state_dict, load_state_dict = QuantizedDDP.state_dict, QuantizedDDP.load_state_dict


class Hanging(PlainDDP, Elastic):
    """Never builds the new groups on rank 0."""

    traits = fx.Traits(elastic=True)

    def world_changed(self, world: World) -> None:
        self.world = world
        if world.rank == 0:
            threading.Event().wait()


class Refusing(Declared):
    """Supports no other world."""

    def world_changed(self, world: World) -> None:
        raise ValueError("Refusing: ranks that die are not replaced")


class Wrong(Declared):
    """Has a defect, which is no refusal."""

    def world_changed(self, world: World) -> None:
        raise TypeError("a defect")


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


def after_a_death(make: Callable[[], fx.Strategy]) -> None:
    strategy_contract._check_death(make, 2, strategy_contract._train(make(), 2))


def test_state_of_each_rank_survives_a_death() -> None:
    after_a_death(Declared)


def test_a_strategy_without_recovery_may_refuse_a_death() -> None:
    after_a_death(Refusing)
    with pytest.raises(WorkerFailed, match="TypeError: a defect"):
        after_a_death(Wrong)


def test_undeclared_state_that_a_replacement_has_from_another_rank_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"after the death of a rank: net.*without a death.*needs traits.unrep"):
        after_a_death(Undeclared)


STANDSTILLS = [
    (Waiting, 30.0, "wait for each other in different collectives"),  # after 15 s
    (Waiting, 5.0, "completed no batch for"),
    (Hanging, 5.0, "completed no batch for"),
]


@pytest.mark.parametrize(("make", "limit_s", "cause"), params([], STANDSTILLS))
def test_a_strategy_that_stands_still_after_a_death_is_named(
    make: Callable[[], fx.Strategy], limit_s: float, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy_contract, "STANDSTILL_S", limit_s)
    with pytest.raises(BrokenContract, match=f"(?s)the run stood still. State that differs .*{cause}"):
        after_a_death(make)


def test_a_run_whose_ranks_diverge_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="ranks differ after step 4"):
        check_strategy(Divergent)


def test_ranks_with_different_weights_are_not_compared() -> None:
    with pytest.raises(ValueError, match="LocalSGD is not synchronous"):
        check_strategy(LocalSGD)
    with pytest.raises(ValueError, match="ranks=5: must divide 12"):
        check_strategy(DDP, ranks=5)
