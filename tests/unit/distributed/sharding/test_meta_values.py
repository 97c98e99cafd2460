"""Layers on the meta device: values that `reset_parameters` would replace are an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.sharding.meta_values import meta_device


class Small(nn.Linear):
    """Has initial values that its inherited `reset_parameters` does not set."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        nn.init.normal_(self.weight, std=0.02)


class Ones(nn.Module):
    """Sets its values in `reset_parameters`, as the meta device requires."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((3,), 2.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.get_buffer("scale").fill_(2.0)


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))


class Transformer(nn.Module):
    """Initialises its layers by `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(4, 3), nn.LayerNorm(3)
        self.apply(self._begin)

    def _begin(self, part: nn.Module) -> None:
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)


def filled(layer: Any) -> Any:
    layer.weight.data.fill_(0.5)
    return layer


def replaced(layer: Any) -> Any:
    layer.weight = nn.Parameter(torch.zeros(2, 3))
    return layer


def loaded(layer: Any) -> Any:
    layer.load_state_dict({"weight": torch.zeros(2, 3, device="cpu"), "bias": torch.zeros(2, device="cpu")})
    return layer


def tied(first: Any, second: Any) -> Any:
    second.weight = first.weight
    return nn.Sequential(first, second)


def build(make: Callable[[], nn.Module], *, checkpoint: bool = False) -> nn.Module:
    root = nn.Module()
    with meta_device(root, filled=checkpoint):
        root.net = make().double()  # the conversion copies tensors
    return root


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Conv1d(2, 3, 1), nn.Embedding(3, 2, 1), nn.LSTM(2, 3), nn.PReLU()),
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)),
        Ones,
        lambda: tied(nn.Linear(3, 2), nn.Linear(3, 2)),
    ],
)  # fmt: skip
def test_meta_layers_are_initialised_by_reset_parameters(make: Callable[[], nn.Module]) -> None:
    assert all(parameter.is_meta for parameter in build(make).parameters())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: filled(nn.Linear(3, 2)), "net.weight"), (lambda: replaced(nn.Linear(3, 2)), "net.weight"),
        (lambda: loaded(nn.Linear(3, 2)), "net.weight"), (Small, "net.weight"), (Masked, "net.mask"),
        (Transformer, "net.table.weight"), (lambda: tied(nn.Embedding(3, 2), nn.Linear(2, 3)), "net.1.weight"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
def test_values_that_would_be_lost_are_refused_unless_a_checkpoint_replaces_them(
    make: Callable[[], nn.Module], name: str
) -> None:
    build(make, checkpoint=True)
    with pytest.raises(ValueError, match=rf"{name} is given values in configure_model, .* in __init__ or setup"):
        build(make)
