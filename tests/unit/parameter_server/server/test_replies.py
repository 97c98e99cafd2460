"""Compressed replies: the first has complete weights, and later replies are differences from it."""

from __future__ import annotations

import torch

from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import Pull, Push
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
