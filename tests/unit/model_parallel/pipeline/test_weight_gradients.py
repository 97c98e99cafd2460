from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fabricx.model_parallel.pipeline.weight_gradients import DeferredWeights


class Model(nn.Module):
    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 4, bias=False)
        self.scale = nn.Parameter(torch.randn(4, 2))
        self.bias = nn.Parameter(torch.randn(2))
        if hooked:
            self.second.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, inputs):
        hidden = self.second(torch.tanh(self.first(inputs)))
        return torch.addmm(self.bias, hidden.flatten(0, 1), self.scale).square().sum() + self.first.weight.sum()


def gradients(model, inputs):
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {"inputs": inputs.grad}


@pytest.mark.parametrize("dtype", [None, torch.complex128, torch.bfloat16], ids=["float64", "complex", "autocast"])
def test_deferred_gradients_are_equal_to_autograds(dtype):
    results = []
    half = dtype is torch.bfloat16
    for defer in (False, True):
        model = Model() if half else Model().double()
        for parameter in model.parameters() if dtype is torch.complex128 else ():
            parameter.data = parameter.data * (1 + 0.5j)
        inputs = torch.ones(2, 6, 3, dtype=model.bias.dtype, requires_grad=True)
        mode = DeferredWeights()
        for _ in range(2):  # gradients are accumulated
            with torch.autocast("cpu", torch.bfloat16):  # which changes neither float64 nor complex numbers
                if defer:
                    with mode:
                        loss = model(inputs)
                else:
                    loss = model(inputs)
            loss.real.backward()
            assert len(mode.queue) == (3 if defer else 0)
            assert not defer or model.second.weight.grad is None or len(results) == 1
            while mode.queue:
                mode.queue.pop()()
        results.append(gradients(model, inputs))
    for name, expected in results[0].items():
        tolerance = 0.05 if half else 1e-12
        assert torch.allclose(results[1][name], expected, atol=tolerance, rtol=tolerance), name
        assert results[1][name].dtype == expected.dtype


def test_weights_with_a_gradient_hook_and_frozen_weights_are_not_deferred():
    model, mode = Model(hooked=True), DeferredWeights()
    model.first.weight.requires_grad_(False)
    inputs = torch.ones(1, 2, 3)
    with mode:
        model(inputs).backward()
        F.linear(inputs, torch.ones(4, 3, requires_grad=True)).sum().backward()  # no parameter
    assert len(mode.queue) == 1  # of addmm
    assert model.second.weight.grad is not None
    with mode, torch.no_grad():
        model(inputs)


def test_checkpointed_code_is_not_deferred_as_it_computes_again_outside_of_the_mode():
    results = []
    for defer in (False, True):
        model, mode = Model().double(), DeferredWeights()
        inputs = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
        for reentrant in (False, True):
            with mode if defer else contextlib.nullcontext():
                loss = checkpoint(model, inputs, use_reentrant=reentrant)
            loss.backward()
        assert not mode.queue
        results.append(gradients(model, inputs))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name
