"""Compressed replies: the first has complete weights, and later replies are differences from it."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import Pull, Push, ServerInit, Settings
from fabricx.parameter_server.wire.partition import divide
from tests.unit.parameter_server.server.test_server import SIZE, begin


def test_only_the_first_weights_of_a_worker_are_complete() -> None:
    init, _ = begin(workers=1, aggregate=False, pull_compression="bf16")
    server, inbox, outbox = Server(1), torch.full((SIZE,), 0.3), torch.zeros(SIZE)
    server.handle(0, init, inbox, outbox)
    received, sizes = torch.zeros(SIZE), []
    for clock in range(4):
        reply = server.handle(0, Pull(to_train=True, rows={}), inbox, outbox)
        sizes.append(sum(stop - start for start, stop in reply.spans))
        if reply.scale is None:
            received = outbox.clone()
        else:
            received += outbox.view(torch.bfloat16)[:SIZE].float()
        assert torch.allclose(received, server.values, atol=1e-3)
        server.handle(0, Push(clock, 1, (clock,)), inbox, outbox)
    assert sizes == [4 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE]


def test_errors_of_a_compressed_sum_wait_while_no_worker_has_a_gradient() -> None:
    pieces = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]
    [shard] = divide([piece.shape for piece in pieces], 1)
    server, vector = Server(1), torch.zeros(8)
    settings = Settings(1, pull_compression="sign")
    server.handle(0, ServerInit(settings, None, pieces, shard, torch.float32, 0), vector, vector)
    for clock, missing in enumerate((frozenset(), frozenset({1}), frozenset({1}))):
        before = server.state.shard.error_feedback
        vector.copy_(torch.arange(8.0))
        server.handle(0, Push(clock, 1, (0,), missing=missing), vector, vector)
        after = server.state.shard.error_feedback
        assert before is not None
        assert after is not None
        assert clock == 0 or torch.equal(after[4:], before[4:])
