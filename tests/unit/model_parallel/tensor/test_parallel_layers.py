"""Placements of the parameters of each kind of layer."""

from __future__ import annotations

import pytest
from torch import nn

from fabricx.model_parallel.tensor.parallel_layers import Layer, kind_of, layers_of, placements_of


def test_dims_of_weights_and_biases_by_style():
    linear = nn.Linear(8, 12)
    placed = placements_of(linear, Layer("colwise", (4, 4, 4)), 2)
    assert {key: (placement.dim, placement.parts) for key, placement in placed.items()} == {
        "weight": (0, (4, 4, 4)), "bias": (0, (4, 4, 4))
    }  # fmt: skip
    assert [(key, placement.dim) for key, placement in placements_of(linear, Layer("rowwise"), 2).items()] == [
        ("weight", 1)
    ]


def test_an_attention_layer_is_one_layer():
    for attention in (nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=6, vdim=4)):
        root = nn.Sequential(attention)
        assert [(name, kind) for name, _, kind in layers_of(root)] == [("0", "attention")]
        placed = placements_of(attention, Layer("attention"), 2)
        assert placed["out_proj.weight"].dim == 1
        assert placed["in_proj_bias"].parts == (8, 8, 8)
        assert sum(sum(placement.parts) for key, placement in placed.items() if key.endswith("proj_weight")) == 24


def test_a_style_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="Embedding can't be sharded as rowwise; it can be: vocab"):
        placements_of(nn.Embedding(4, 4), Layer("rowwise"), 2)


def test_modules_without_a_matrix_are_no_layers():
    assert [kind_of(part) for part in (nn.LayerNorm(4), nn.Conv1d(1, 1, 1), nn.Bilinear(2, 2, 2))] == ["", "", ""]
