"""Submodules that are divisible experts, and reasons for refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.model_parallel.experts.modules import find_experts


class Experts(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num_experts = count
        self.up, self.bias = nn.Parameter(torch.ones(count, 2, 3)), nn.Parameter(torch.ones(count, 3))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return tokens


class Router(nn.Module):
    """As in transformers: it also has a row for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.ones(4, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class OfTokens(Experts):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return tokens


class Any2(Experts):
    def forward(self, *args: Any) -> Any:  # type: ignore[override]
        return args[0]


def model(**more: nn.Module) -> nn.Module:
    layer = nn.ModuleDict({"gate": Router(), "experts": Experts(), "norm": nn.LayerNorm(2)})
    return nn.ModuleDict({"layer": layer, "other": OfTokens(), **more})


def test_experts_are_found_by_their_shapes_and_arguments() -> None:
    assert [name for name, _ in find_experts(model(), "auto", 2)] == ["layer.experts"]
    assert [name for name, _ in find_experts(model(last=Any2()), "auto", 2)] == ["layer.experts", "last"]
    assert [name for name, _ in find_experts(model(last=Any2()), "Any2", 2)] == ["last"]
    assert [name for name, _ in find_experts(model(last=Any2()), ["layer.experts"], 2)] == ["layer.experts"]


def test_experts_may_have_several_names() -> None:
    module = model()
    module.again = module.layer
    assert [name for name, _ in find_experts(module, "auto", 2)] == ["layer.experts"]


def buffered() -> nn.Module:
    experts = Experts()
    experts.register_buffer("scale", torch.ones(4))
    return experts


def uneven() -> nn.Module:
    experts = Experts()
    experts.gain = nn.Parameter(torch.ones(3))
    return experts


def tied() -> nn.Module:
    experts, other = Experts(), nn.Module()
    other.matrix = experts.up
    return nn.ModuleDict({"experts": experts, "other": other})


@pytest.mark.parametrize(
    ("module", "experts", "ranks", "error", "message"),
    [
        (nn.Linear(2, 2), "auto", 2, ValueError, "no submodule has experts to divide.*Or use strategy=ddp"),
        (model(), "auto", 3, ValueError, "layer.experts has 4 experts.*set expert to a divisor of 4"),
        (model(), "OfTokens", 2, ValueError, "other has a forward without the experts of the tokens"),
        (model(), ["layer.gate"], 2, ValueError, "layer.gate has no stacked matrices"),
        (model(), ["layer.norm"], 2, ValueError, "layer.norm has no attribute num_experts"),
        (model(last=buffered()), ["last"], 2, ValueError, "last has a buffer scale"),
        (model(last=uneven()), ["last"], 2, ValueError, r"a parameter gain of shape \(3,\), and 4 experts"),
        (model(), "Expert", 2, LookupError, "Did you mean 'Experts'"),
        (model(), ["layer.expert"], 2, LookupError, "Did you mean 'layer.experts'"),
        (tied(), "auto", 2, ValueError, "other.matrix is tied to the experts experts"),
    ],
)
def test_modules_that_cannot_be_divided_are_an_error(
    module: nn.Module, experts: Any, ranks: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_experts(module, experts, ranks)
