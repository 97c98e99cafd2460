"""Gradient clipping; equal to torch's on a single rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.distributed.world import World
from fabricx.model_parallel.gradient_norm import clip_norm, clip_value, total_norm


def with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return [*parameters, nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("limit", [0.1, 100.0])
def test_the_norm_on_a_single_rank_is_equal_to_torchs(limit):
    ours, theirs = (with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])) for _ in range(2))
    norm = clip_norm(ours, limit, World(), lambda _: 1)
    assert norm == nn.utils.clip_grad_norm_(theirs, limit) == 13.0
    assert norm.dtype is torch.float32
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)


def test_elements_with_several_copies_count_once():
    [parameter, _] = with_gradients(torch.tensor([6.0, 8.0]))
    assert clip_norm([parameter], 100.0, World(), lambda _: 4) == 5.0


def test_gradient_values_are_clipped():
    [parameter, _] = with_gradients(torch.tensor([-3.0, 0.5]))
    clip_value([parameter], 1.0)
    assert parameter.grad.tolist() == [-1.0, 0.5]


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        clip_norm(table.parameters(), 1.0, World(), lambda _: 1)


def test_the_norm_counts_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()  # a row of [2, 2], twice
    [parameter, _] = with_gradients(torch.tensor([1.0]))
    assert total_norm([*table.parameters(), parameter], World(), lambda _: 1) == 3.0


def test_the_norm_has_the_precision_of_the_weights_on_a_rank_without_gradients():
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    assert clip_norm([frozen], 1.0, World(), lambda _: 1).dtype is torch.float64
    assert clip_norm([nn.Parameter(torch.zeros(2))], 1.0, World(), lambda _: 1).dtype is torch.float32
