"""Loss scaling on the CPU, where GradScaler works as on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx.core.precision import MixedPrecision, make_precision
from fabricx.testing import TinyModule, tiny_loader


def stepped(gradient: float, *, clip: float | None = None) -> tuple[Tensor, float, bool]:
    """Step once with gradient 1.0 * gradient in 16-mixed; returns the weight, the scale, and whether it stepped."""
    precision = MixedPrecision("16-mixed", "cpu")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaled = precision.scale(weight * gradient)
    scaled.backward()
    if clip is not None:
        precision.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], clip)
    done = precision.step(optimizer, lambda optimizer, closure: optimizer.step(closure))
    precision.updated()
    return weight.detach(), precision.state_dict()["scale"], done


def test_a_step_uses_the_gradient_of_the_unscaled_loss() -> None:
    weight, scale, done = stepped(0.25)
    assert done
    assert weight.item() == -0.25  # a power of two: scaling it is exact
    assert scale == 65536.0


def test_clipping_uses_unscaled_gradients() -> None:
    assert stepped(8.0, clip=2.0)[0].item() == pytest.approx(-2.0)


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_halved() -> None:
    weight, scale, done = stepped(float("inf"))
    assert not done
    assert weight.item() == 0.0
    assert scale == 32768.0


def test_each_optimizer_is_skipped_according_to_its_own_gradients() -> None:
    precision = MixedPrecision("16-mixed", "cpu")
    weights = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    precision.scale(weights[0] * 1.0 + weights[1] * float("inf")).backward()
    assert [precision.step(optimizer, plain) for optimizer in optimizers] == [True, False]
    assert [weight.item() for weight in weights] == [-1.0, 0.0]


def plain(optimizer: torch.optim.Optimizer, closure: Any) -> None:
    optimizer.step(closure)


def test_a_parameter_of_two_optimizers_is_unscaled_once() -> None:
    for gradient, expected in ((1.0, -2.0), (float("inf"), 0.0)):
        precision, shared = MixedPrecision("16-mixed", "cpu"), torch.nn.Parameter(torch.zeros(()))
        optimizers = [torch.optim.SGD([shared], lr=1.0) for _ in range(2)]
        precision.scale(shared * gradient).backward()
        done = [precision.step(optimizer, plain) for optimizer in optimizers]
        precision.updated()
        assert (shared.item(), done) == (expected, [gradient == 1.0] * 2)


def test_gradients_that_were_clipped_before_another_optimizer_stepped_are_unscaled_once() -> None:
    precision = MixedPrecision("16-mixed", "cpu")
    weights = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        precision.scale(weight * 0.5, between_steps=True).backward()
        precision.unscale(optimizer)
    for optimizer in optimizers:
        precision.step(optimizer, plain)
        precision.updated(optimizer)
    assert [weight.item() for weight in weights] == [-0.5, -0.5]


@pytest.mark.parametrize("manual", [False, True])
def test_a_batch_that_is_repeated_after_a_fault_is_unscaled_again(manual: bool) -> None:
    precision, weight = MixedPrecision("16-mixed", "cpu"), torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):  # the first has no step: a worker died while gradients were clipped
        weight.grad = None
        if manual:
            precision.begin()
        precision.scale(weight * 1.0, between_steps=manual).backward()
        precision.unscale(optimizer)
    precision.step(optimizer, plain)
    assert weight.item() == -1.0


def test_16_mixed_uses_fp16_on_cuda_and_bf16_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="bf16-mixed"):
        make_precision("16-mixed", torch.device("meta"))
    with pytest.warns(UserWarning, match="this device is a CPU: it is 'bf16-mixed'"):
        precision = make_precision("16-mixed", torch.device("cpu"))
    assert isinstance(precision, MixedPrecision)
    assert (precision.dtype, precision.scaler) == (torch.bfloat16, None)


@pytest.mark.parametrize("name", ["64-true", "bf16-true"])
def test_complex_numbers_stay_complex(name: str) -> None:
    module = torch.nn.Linear(2, 1)
    module.register_buffer("turn", torch.tensor([1.0 + 2.0j]))
    make_precision(name, torch.device("cpu")).convert(module)
    assert torch.equal(module.turn, torch.tensor([1.0 + 2.0j]))
    assert module.weight.dtype == {"64-true": torch.float64, "bf16-true": torch.bfloat16}[name]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_every_precision_trains(precision: str, quiet: dict[str, Any]) -> None:
    module = TinyModule()
    fx.Trainer(max_epochs=2, precision=precision, **quiet).fit(module, tiny_loader(), tiny_loader())
    kept = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    assert module.dtype == kept
    assert float(module.layer.weight.detach().mean()) != 0.5
