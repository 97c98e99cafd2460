"""`fabricx.testing.check_strategy` accepts strategies that keep the contract, and names violations of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fabricx as fx
from examples.plain_ddp import PlainDDP
from examples.quantized_ddp import QuantizedDDP
from fabricx.callbacks import FaultRecovery
from fabricx.core.strategy import Strategy
from fabricx.core.strategy_parts import Elastic
from fabricx.distributed.world import World
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, LocalSGD
from fabricx.testing import QUIET, BrokenContract, TinyModule, check_strategy, strategy_contract, tiny_loader
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROUNDING = 0.05  # of gradients of 8 bits, over 12 steps


@pytest.mark.parametrize("strategy", params([FSDP], [DDP]))
def test_strategies_keep_the_contract(strategy: type[Strategy]) -> None:
    check_strategy(strategy)


def test_the_examples_of_the_guide_keep_the_contract() -> None:
    check_strategy(PlainDDP)
    check_strategy(QuantizedDDP, ranks=3, tolerance=ROUNDING)


class OnceNaN(TinyModule):
    """Has a NaN loss once, on a single rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_step, self.global_rank) == (3, 0) else loss


def test_the_error_feedback_of_the_guide_does_not_keep_a_gradient_that_is_skipped() -> None:
    weights = []
    for strategy in (QuantizedDDP(), DDP()):
        module = OnceNaN()
        options = {**QUIET, "callbacks": [FaultRecovery(bad_gradients="skip", snapshots=False)]}
        fx.Trainer(max_epochs=3, devices=2, strategy=strategy, **options).fit(module, tiny_loader(32, 2))
        weights.append(module.layer.weight.detach())
    assert torch.allclose(*weights, rtol=ROUNDING, atol=ROUNDING)


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
    """The replacement of a dead rank receives the rounding errors of another rank."""

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


class Miscounting(Declared):
    """Raises a `ValueError` of a defect."""

    def world_changed(self, world: World) -> None:
        raise ValueError("expected 2, got 1")


class Busy(PlainDDP):
    """Reduces gradients on ranks with a sample only."""

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        fx.Strategy.backward(self, loss, compute)
        PlainDDP.backward_without_data(self)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        return True


class Wordless(PlainDDP):
    """Doesn't report whether a rank without a sample took part in the reduction."""

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        super().backward_without_data(example)
        return None  # type: ignore[return-value]


class Unequal(PlainDDP):
    """Trains each rank from different initial weights."""

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        fx.Strategy.setup(self, module)


class Demanding(QuantizedDDP):
    """Loads only its own checkpoints."""

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        fx.Strategy.load_state_dict(self, state, module, optimizers)
        self._errors = dict(state["errors"][self.world.rank])


class Numbered(Demanding):
    """Loads only checkpoints of as many ranks."""

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict({"errors": [self._errors] * self.world.size, **state}, module, optimizers)


class Fixed(QuantizedDDP):
    """Refuses checkpoints of a different number of ranks."""

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        if len(state.get("errors", [])) not in (0, self.world.size):
            raise ValueError("Fixed: the checkpoint is of another number of ranks")
        super().load_state_dict(state, module, optimizers)


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (Summed, "plain: net.0.weight differs by .* Are gradients summed, or averaged"),
        (Eager, "accumulated: net.0.weight differs by .* Are gradients reduced at the end of an accumulation window"),
        (Repeated, "manual optimization: net.0.weight differs by .* Does the second call reduce"),
        (Forgetful, "resumed: net.0.weight differs by .* Does state_dict contain all state"),
    ],
)
def test_a_strategy_that_breaks_the_contract_is_named(make: Callable[[], fx.Strategy], promise: str) -> None:
    with pytest.raises(BrokenContract, match=promise):
        check_strategy(make, tolerance=ROUNDING)


def after_a_death(make: Callable[[], fx.Strategy]) -> None:
    strategy_contract._check_death(make, 2, strategy_contract._train(make(), 2))


def test_state_of_each_rank_survives_a_death() -> None:
    after_a_death(Declared)


def test_a_strategy_without_recovery_may_refuse_a_death() -> None:
    with pytest.raises(WorkerFailed, match="Refusing: ranks that die are not replaced"):
        strategy_contract._train_with_death(Refusing(), 2)
    after_a_death(Refusing)
    with pytest.raises(WorkerFailed, match="TypeError: a defect"):
        after_a_death(Wrong)


def test_an_error_after_a_death_that_does_not_name_the_strategy_is_a_defect() -> None:
    with pytest.raises(
        BrokenContract, match=r"(?s)the run failed. A strategy that cannot continue .*expected 2, got 1"
    ):
        after_a_death(Miscounting)


def test_ranks_without_a_sample_that_call_no_collective_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_contract, "STANDSTILL_S", 10.0)
    with pytest.raises(
        BrokenContract,
        match=r"fewer samples than ranks: the run stood still. .* does backward_without_data, which a rank without",
    ):
        check_strategy(Busy)


def test_a_strategy_that_returns_none_for_a_rank_without_a_sample_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"Wordless\.backward_without_data returned None, and has to return True"):
        strategy_contract._train(Wordless(), 2, samples=13)


def test_initial_weights_that_stay_different_are_named() -> None:
    plain = strategy_contract._train(PlainDDP(), 2, **strategy_contract.RUNS["plain"])
    with pytest.raises(BrokenContract, match=r"initial weights .* Does setup broadcast the weights of rank 0"):
        strategy_contract._check_initial_weights(Unequal, 2, plain)


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (Demanding, "(?s)a checkpoint of 1 rank, resumed on 2 ranks: the run failed. .*KeyError: 'errors'"),
        (Numbered, "(?s)a checkpoint of 2 ranks, resumed on 3 ranks: the run failed. .*IndexError"),
    ],
)
def test_state_that_other_checkpoints_lack_is_named(
    make: Callable[[], fx.Strategy], promise: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenContract, match=promise):
        strategy_contract._check_resuming(make, 2, tmp_path, ROUNDING)


def test_a_strategy_may_refuse_another_number_of_ranks(tmp_path: Path) -> None:
    strategy_contract._check_resuming(Fixed, 2, tmp_path, ROUNDING)


def test_undeclared_state_that_a_replacement_has_from_another_rank_is_named() -> None:
    with pytest.raises(BrokenContract, match=r"after the death of a rank: net.*without a death.*needs traits.unrep"):
        after_a_death(Undeclared)


STANDSTILLS = [
    (Waiting, 30.0, "wait for each other in different collectives"),  # after 15 s
    (Waiting, 5.0, "completed no batch for"),
    (Hanging, 5.0, "completed no batch for"),
]


@pytest.mark.parametrize(("make", "limit_s", "cause"), params([], STANDSTILLS))
def test_a_strategy_that_hangs_after_a_death_is_named(
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
