"""Selection of the submodules that are sharded as units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.distributed.sharding.fsdp_units import (
    blocks,
    check_owned,
    check_shardable,
    outermost_owners,
    tied_parameters,
)


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(4, 10)


def test_auto_finds_only_the_repeated_layers() -> None:
    model = Model()
    assert blocks(model, "auto") == list(model.layers)[::-1]


def test_auto_finds_no_units_in_a_model_without_repeated_layers() -> None:
    assert blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "auto") == []


def test_auto_selects_the_layers_in_nested_lists_which_have_no_forward() -> None:
    stages = nn.ModuleList([nn.ModuleList([Layer(), nn.Linear(4, 4)]), nn.ModuleDict({"block": Layer(), "x": Layer()})])
    assert blocks(nn.Sequential(stages), "auto") == [stages[1]["x"], stages[1]["block"], stages[0][0]]
    dense = type("Dense", (nn.ModuleDict,), {"forward": lambda self, x: x})
    stages = nn.ModuleList([dense({"a": Layer()}), dense({"a": Layer()})])
    assert blocks(nn.Sequential(stages), "auto") == [stages[1], stages[0]]


def test_classes_are_found_by_name_inner_ones_first() -> None:
    model = Model()
    selected = blocks(model, ["Layer", "Linear"])
    assert selected.index(model.layers[0].attention) < selected.index(model.layers[0])
    assert len(selected) == 3 + 3 * 3 + 1
    with pytest.raises(ValueError, match="Did you mean 'Layer'"):
        blocks(model, "Laier")


def test_units_by_size_have_the_minimum_of_own_parameters() -> None:
    model = Model()
    selected = blocks(model, 70)  # attention 20, mlp 76, so a layer without its mlp has too few; embedding 40, head 50
    assert selected == [layer.mlp for layer in model.layers][::-1]
    assert blocks(model, 90) == list(model.layers)[::-1]


def test_owners_are_the_outermost_submodules_with_direct_parameters_outside_of_units() -> None:
    model = Model()
    assert outermost_owners(model, list(model.layers)) == [model.embedding, model.head]
    first = model.layers[0]
    assert outermost_owners(first, []) == [first.attention, first.mlp[0], first.mlp[2]]


def test_parameters_of_several_submodules_are_tied() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    assert tied_parameters(model, model.head) == ["weight"]
    assert tied_parameters(model, model.layers[0]) == []
    with pytest.raises(ValueError, match=r"embedding\.weight belongs to several submodules"):
        check_owned(model)


@pytest.mark.parametrize("parameter", [nn.Parameter(torch.zeros(2)), nn.ParameterList([torch.zeros(2)])])
def test_parameters_of_the_root_are_refused_for_manual_steps(parameter: nn.Parameter | nn.ParameterList) -> None:
    model = Model()
    check_owned(model)
    model.scale = parameter
    with pytest.raises(ValueError, match="belongs to the manually optimised module itself; move it to a submodule"):
        check_owned(model)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.zeros(()), "it has no dimensions; give it the shape"),
        (torch.zeros(0, 3), r"it has no elements \(shape \[0, 3\]\); remove it"),
        (torch.zeros(2, 3).T, "it is not contiguous in memory; create it"),
    ],
)
def test_parameters_that_cannot_be_divided_are_refused_by_name(values: torch.Tensor, reason: str) -> None:
    model = Model()
    check_shardable(model)
    model.layers[1].extra = nn.Parameter(values)
    with pytest.raises(ValueError, match=rf"can't divide layers\.1\.extra over the ranks: {reason}"):
        check_shardable(model)
