"""Errors that mean that a peer was lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.core.strategy import Strategy
from fabricx.distributed.membership.lost_peers import is_peer_lost, may_be_cut, raise_peer_lost
from fabricx.distributed.world import World
from fabricx.errors import PeerLost, ServerLost

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:43210"


def raised_from(cause: Exception, *, hidden: bool = False) -> Exception:
    error = ValueError("of the user's code")
    error.__context__, error.__suppress_context__ = cause, hidden
    return error


def test_lost_peers_are_recognised_by_type_or_gloo_message_also_as_a_cause() -> None:
    for lost in (PeerLost("gone"), ServerLost("gone"), RuntimeError(GLOO), raised_from(RuntimeError(GLOO))):
        assert is_peer_lost(lost), lost
    for other in (None, RuntimeError("CUDA error"), raised_from(RuntimeError(GLOO), hidden=True)):
        assert not is_peer_lost(other), other


def test_other_socket_errors_may_be_cut_connections() -> None:
    assert may_be_cut(OSError("Broken pipe"))
    assert not is_peer_lost(OSError("Broken pipe"))
    assert not may_be_cut(ValueError("shapes differ"))


def test_only_an_error_of_a_lost_peer_is_converted_and_keeps_its_message() -> None:
    raise_peer_lost(RuntimeError("shapes differ"), "rank 0 of 2, backward")
    error = RuntimeError(GLOO)
    with pytest.raises(PeerLost, match=r"rank 0 of 2, backward: .*closed by peer") as caught:
        raise_peer_lost(error, "rank 0 of 2, backward")
    assert caught.value.__cause__ is error
    raise_peer_lost(caught.value, "again")  # has its type already


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(GLOO)


def test_a_backward_with_communication_raises_the_lost_peer_error() -> None:
    strategy = Strategy()
    strategy.enter(World(rank=1, size=2), nn.Linear(1, 1))
    loss = _Cut.apply(nn.Linear(1, 1)(torch.ones(1, 1)).sum())
    with pytest.raises(PeerLost, match="rank 1 of 2, backward: the connection to another rank was lost"):
        strategy.backward(loss)
