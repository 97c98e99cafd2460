"""Only changed rows are sent where workers meet; whole tables if the changes are unknown."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn, optim

from fabricx.parameter_server.optimizer_parts import sliced
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import INITIAL_HISTORY, Pull, Push, ServerInit, Settings
from fabricx.parameter_server.wire.partition import divide

HEIGHT, WIDTH = 6, 2


def test_a_server_tracks_changed_rows_also_after_a_restart() -> None:
    table = nn.Parameter(torch.zeros(HEIGHT, WIDTH))
    optimizer = optim.SGD([table], lr=1.0)
    [shard] = divide([table.shape], 1, by_row=frozenset({0}))
    packed, pieces = sliced([optimizer], [table], shard)
    server = Server(1)
    server.handle(
        0, ServerInit(Settings(1, aggregate=False), packed, pieces, shard, torch.float32, 7), *[torch.empty(0)] * 2
    )
    outbox, none = torch.zeros(shard.room), torch.empty(0)

    def push(rows: list[int]) -> None:
        inbox = torch.zeros(shard.room)
        ids, values = shard.rows_in(inbox, 0, len(rows))
        ids.copy_(torch.tensor(rows))
        values.fill_(-1.0)
        server.handle(0, Push(0, 1, (0,), rows={0: len(rows)}), inbox, none)

    def pull(since: Any) -> Any:
        reply = server.handle(0, Pull(since=since), none, outbox)
        history, counts = reply.content
        assert sum(stop - start for start, stop in reply.spans) == 4 * (
            HEIGHT * WIDTH if counts is None else counts[0] * (1 + WIDTH)
        )
        if counts is None:
            return (history, reply.version), outbox[: HEIGHT * WIDTH].view(HEIGHT, WIDTH)[:, 0].tolist()
        ids, values = shard.rows_in(outbox, 0, counts[0])
        return (history, reply.version), dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True))

    push([1, 4])
    push([4])
    had, rows = pull((INITIAL_HISTORY, 7))
    assert (had, rows) == ((INITIAL_HISTORY, 9), {1: 1.0, 4: 2.0})
    push([0])
    had, rows = pull(had)
    assert (had, rows) == ((INITIAL_HISTORY, 10), {0: 1.0})
    assert pull((INITIAL_HISTORY, 3))[1] == [1.0, 1.0, 0.0, 0.0, 2.0, 0.0]  # a worker of an earlier connection
    snapshot = copy.deepcopy(server.snapshot())
    server = Server(1)
    server.restore(snapshot)  # like a restarted server
    push([5])
    assert pull(had)[1] == {5: 1.0}
