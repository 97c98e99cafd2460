"""Optional parts of the strategy contract: implemented by inheritance, with defaults otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import (
    DealsData,
    Elastic,
    HasServers,
    HidesGradients,
    MeasuresWaiting,
    ShardsWeights,
    WrapsStep,
    as_part,
)
from fabricx.distributed.world import World
from fabricx.strategies import DDP, FSDP, AsyncSGD, ParameterServer, Single


class Plain(Strategy):
    """A strategy without optional parts."""


@pytest.mark.parametrize("part", [DealsData, HasServers, HidesGradients, MeasuresWaiting, ShardsWeights, WrapsStep])
def test_a_strategy_without_a_part_has_its_defaults(part: type) -> None:
    assert not isinstance(Plain(), part)
    assert type(as_part(Plain(), part)) is part


def test_a_strategy_with_a_part_is_that_part() -> None:
    sharded, served = FSDP(), ParameterServer(servers=2)
    assert as_part(sharded, ShardsWeights) is sharded
    assert as_part(served, HasServers) is served
    assert (as_part(served, HasServers).servers, as_part(DDP(), HasServers).servers) == (2, 0)


def test_a_method_of_a_part_that_is_not_inherited_is_an_error_that_names_the_part() -> None:
    with pytest.raises(TypeError, match=r"world_changed would never be called: .* as in class Grows\("):
        type("Grows", (Strategy,), {"world_changed": lambda self, world: None})
    type("Grows", (Strategy, Elastic), {"world_changed": lambda self, world: None})
    with pytest.raises(NotImplementedError, match="inherits Elastic and implements world_changed"):
        as_part(Plain(), Elastic).world_changed(World())


def test_only_ranks_at_their_own_pace_receive_leases() -> None:
    own_pace = AsyncSGD()
    assert not own_pace.traits.lockstep
    assert as_part(own_pace, DealsData).dealer is own_pace.dealer
    for strategy in (ParameterServer(), DDP(), Plain()):
        dealer = as_part(strategy, DealsData).dealer
        assert strategy.traits.lockstep
        assert (dealer.within_section, dealer.may_drop, dealer.position()) == (False, False, None)


def test_default_parts_read_the_gradients_of_parameters() -> None:
    layer, gradients = nn.Linear(2, 1), as_part(Single(), HidesGradients)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    layer.bias.grad = torch.tensor([torch.inf])
    assert gradients.nonfinite_gradients(layer.parameters()) == [layer.bias]
    gradients.drop_gradients([layer.bias])
    assert layer.bias.grad is None


@pytest.mark.parametrize(
    ("traits", "replicas"),
    [
        (Traits(), [2, 0, 1, 3, 4, 5]),
        (Traits(unreplicated=True), [2]),
        (Traits(synchronous=False), [2]),
        (Traits(sharded=True), [2]),
        (Traits(sharded=True, replicas=3), [2, 0, 4]),
        (Traits(sharded=True, replicas=4), [2]),  # does not divide 6 ranks
    ],
)
def test_replicas_follow_from_traits(traits: Traits, replicas: list[int]) -> None:
    assert traits.replicas_of(2, 6) == replicas


@pytest.mark.parametrize(
    ("axes", "replicas", "parts", "represents"),
    [
        ((2, 2, 1, 1), [2, 3, 6, 7], [0, 0, 1, 1, 0, 0, 1, 1], [2, 6]),  # rank 0 holds a different stage
        ((1, 2, 2, 1), [2, 0, 4, 6], [0, 1, 0, 1, 0, 1, 0, 1], [0, 4]),
        ((2, 1, 2, 1), [2, 6], [0, 1, 2, 3, 0, 1, 2, 3], [2, 6]),
    ],
)
def test_ranks_with_the_same_part_of_a_model_are_replicas(
    axes: tuple[int, int, int, int], replicas: list[int], parts: list[int], represents: list[int]
) -> None:
    traits = Traits(unreplicated=True, model_axes=axes)
    assert traits.replicas_of(2, 8) == replicas
    model_parts = [traits.model_part(rank) for rank in range(8)]
    assert [sorted(set(model_parts)).index(part) for part in model_parts] == parts
    assert [rank for rank in range(8) if traits.represents(rank)] == represents
    assert traits.resizable
    assert not Traits(synchronous=False, model_axes=axes).resizable
