"""Rows that ranks exchange, and the gradients that return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from fabricx.model_parallel.experts.token_exchange import exchange, exchanged


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Numbers of rows of each all-to-all, which returns the last rows that were sent, from a single rank."""
    seen: list[Any] = []

    def all_to_all_single(output: Tensor, tensor: Tensor, received: Any, sent: Any, group: Any) -> None:
        assert tensor.is_contiguous()
        seen.append((received, sent))
        output.copy_(tensor[len(tensor) - len(output) :] if len(tensor) >= len(output) else tensor[[-1] * len(output)])

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    return seen


def test_gradients_return_by_the_same_route(splits: list[Any]) -> None:
    tokens, weights = torch.arange(6.0).view(3, 2).requires_grad_(), torch.ones(3)
    rows, others = exchange((tokens, weights), World(size=2), [1, 2], [0, 2])
    assert rows.tolist() == [[2, 3], [4, 5]]
    assert not others.requires_grad
    (rows * 2).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.shape == tokens.shape
    # Forward of both tensors, backward of the tensor that has a gradient.
    assert splits == [([0, 2], [1, 2]), ([0, 2], [1, 2]), ([1, 2], [0, 2])]


def test_equal_numbers_need_no_splits(splits: list[Any]) -> None:
    assert exchanged(torch.arange(4), World(size=2)).tolist() == [0, 1, 2, 3]
    assert splits == [(None, None)]


def test_a_dead_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_to_all_single", broken)
    with pytest.raises(PeerLost, match="expert-parallel group, all_to_all"):
        exchanged(torch.ones(2), World(size=2))
