"""Both parts of complex numbers are counted where tensors are compared, summed or measured."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.core.tensors.complex_numbers import as_real
from fabricx.distributed.world import World
from fabricx.loop.manual_optimization import _fingerprint
from fabricx.model_parallel.gradient_norm import _total
from fabricx.model_parallel.trial import fingerprint
from fabricx.strategies.reproducible import IntegerSums


def parameter() -> nn.Parameter:
    weight = nn.Parameter(torch.tensor([1.0 + 2.0j, -3.0j]))
    weight.grad = torch.tensor([0.5 - 2.0j, 4.0j])
    return weight


def test_both_parts_have_the_memory_of_the_tensor() -> None:
    weight = torch.tensor([1.0 + 2.0j])
    as_real(weight)[0, 1] = 5.0
    assert weight.tolist() == [1.0 + 5.0j]
    real = torch.ones(2)
    assert as_real(real) is real


def test_integer_sums_have_both_parts() -> None:
    weight = parameter()
    sums = IntegerSums([weight], parts=2)
    sums.add()
    weight.grad = torch.tensor([1.0j, 1.0])
    sums.add()
    sums.join(World())
    assert weight.grad.tolist() == [0.5 - 1.0j, 1.0 + 4.0j]


def test_norms_and_fingerprints_have_both_parts() -> None:
    weight = parameter()
    norm = float((0.25 + 4.0 + 16.0) ** 0.5)
    assert float(_total([weight], World(), lambda parameter: 1.0)) == norm
    assert float(_fingerprint(torch.optim.SGD([weight], lr=0.1))[0, 0]) == norm
    assert fingerprint(weight.grad)[0] == norm
