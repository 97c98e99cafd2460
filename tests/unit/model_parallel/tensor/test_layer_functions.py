"""Layers on a rank: dtypes of autocast, and inputs that a function has changed in place."""

from __future__ import annotations

import pytest
import torch

from fabricx.distributed.world import World
from fabricx.model_parallel.placement import Placement
from fabricx.model_parallel.tensor import layer_functions
from fabricx.model_parallel.tensor.layer_functions import LayerFunctions, Weight
from fabricx.model_parallel.tensor.parallel_layers import Layer
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


def test_a_rowwise_layer_returns_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_functions, "summed", lambda tensor, world: tensor)
    functions = LayerFunctions(Activations(World()))
    weight = Weight("layer.weight", Layer("rowwise"), Placement((3, 4), 1, (4,), 1))
    with torch.autocast("cpu", torch.bfloat16):
        output = functions.linear(weight, torch.ones(2, 4), torch.ones(3, 4), torch.ones(3))
    assert output.dtype is torch.bfloat16


def test_a_sharded_input_is_gathered_again_after_a_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    activations = Activations(World())
    monkeypatch.setattr(Activations, "input_of", lambda self, tensor: tensor.local.clone())
    functions, stream = LayerFunctions(activations), ShardedTensor(torch.ones(2, 4), 1, (2, 4))
    first = functions.whole_input(stream)
    assert functions.whole_input(stream) is first
    stream.local.add_(1.0)
    assert functions.whole_input(stream).tolist() == [[2.0] * 4] * 2
