"""Which submodules are sharded by themselves."""

from __future__ import annotations

import pytest
from torch import nn

from fabricx.strategies import FSDP
from fabricx.strategies.fsdp import blocks


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


def test_auto_finds_the_repeated_layers_and_nothing_else() -> None:
    model = Model()
    assert blocks(model, "auto") == list(model.layers)[::-1]


def test_auto_finds_nothing_in_a_model_without_repetition() -> None:
    assert blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "auto") == []


def test_classes_are_found_by_name_inner_ones_first() -> None:
    model = Model()
    found = blocks(model, ["Layer", "Linear"])
    assert found.index(model.layers[0].attention) < found.index(model.layers[0])
    assert len(found) == 3 + 3 * 3 + 1
    with pytest.raises(ValueError, match="Did you mean 'Layer'"):
        blocks(model, "Laier")


def test_by_size_each_block_has_enough_parameters_of_its_own() -> None:
    model = Model()
    found = blocks(model, 70)  # attention 20, mlp 76, so a layer without its mlp has too few; embedding 40, head 50
    assert found == [layer.mlp for layer in model.layers][::-1]
    assert blocks(model, 90) == list(model.layers)[::-1]


@pytest.mark.parametrize(
    ("options", "message"), [({"param_dtype": "float16"}, "known: bf16"), ({"replicas": 0}, "replicas=0")]
)
def test_wrong_options_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP(**options)  # type: ignore[arg-type]
