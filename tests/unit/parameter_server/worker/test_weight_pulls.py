"""Background pulls: the reply is recorded once, by any call that completes the pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.parameter_server.wire.messages import Pull, Reply
from fabricx.parameter_server.wire.partition import Shard
from fabricx.parameter_server.worker.buffers import ExchangeBuffers
from fabricx.parameter_server.worker.exchange import ExchangeStatistics
from fabricx.parameter_server.worker.servers import Servers, VectorOptions
from fabricx.parameter_server.worker.weight_pulls import WeightPulls

HEIGHT, WIDTH = 4, 2


class Answers:
    """A link to a server whose version increases with each pull."""

    def __init__(self, room: int) -> None:
        self.inbox, self.outbox = torch.ones(room), torch.zeros(room)
        self.arrived: Callable[[int], None] | None = None
        self.sent: list[Any] = []
        self.content: Any = None

    def post(self, start: int, stop: int) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def recv(self) -> Reply:
        return Reply(len(self.sent), content=self.content)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Return a server with a table and a vector."""

    def meet(self: Servers, number: int, shard: Shard) -> ExchangeBuffers[Any]:
        return ExchangeBuffers(Answers(shard.room), shard, self.parameters, None, views=False)

    monkeypatch.setattr(Servers, "_connect", meet)
    locator: Any = None
    parameters = [nn.Parameter(torch.zeros(HEIGHT, WIDTH)), nn.Parameter(torch.zeros(3))]
    return Servers(locator, 0, None, parameters, 1, VectorOptions(tables=frozenset({0})))


COMPLETIONS: dict[str, Callable[[Servers, WeightPulls], Any]] = {
    "finish": lambda servers, pulls: pulls.finish(),
    "rows": lambda servers, pulls: pulls.pull_rows({0: torch.tensor([1])}),
    "another pull": lambda servers, pulls: pulls.pull(servers.parameters, to_train=True),
    "a message": lambda servers, pulls: servers.notify(0, Pull()),
}


@pytest.mark.parametrize("how", COMPLETIONS)
def test_the_reply_of_a_background_pull_is_recorded_once(servers: Servers, how: str) -> None:
    pulls, noted = WeightPulls(servers, ExchangeStatistics()), []
    pulls.begin(0, lambda reply, late: noted.append((reply.version, late)))
    pulls.await_parameters({0})
    assert noted == []
    COMPLETIONS[how](servers, pulls)
    pulls.finish()
    assert noted in ([(1, {1})], [(1, set())])  # rows are pulled when all other weights have been written
    assert torch.equal(servers.parameters[1], torch.ones(3))
    pulls.close()


def test_tables_are_complete_until_weights_for_a_gradient_are_pulled(servers: Servers) -> None:
    pulls = WeightPulls(servers, ExchangeStatistics())
    assert pulls.lacks_rows
    pulls.pull(servers.parameters, to_train=True)
    assert pulls.lacks_rows
    sent = servers.buffers[0].link
    assert isinstance(sent, Answers)
    sent.content = "history", None
    pulls.pull_tables()
    assert not pulls.lacks_rows
    assert sent.sent[-1] == Pull(dense=False)
    assert torch.equal(servers.parameters[0], torch.ones(HEIGHT, WIDTH))
    pulls.pull_tables()
    assert sent.sent[-1] == Pull(dense=False, since=("history", 2))  # only changed rows
    pulls.pull(servers.parameters, to_train=True)
    assert pulls.lacks_rows
    pulls.pull(servers.parameters)
    assert not pulls.lacks_rows


def test_a_sparse_gradient_of_a_parameter_that_is_no_table_is_refused(servers: Servers) -> None:
    gradient = torch.zeros(3).to_sparse()
    with pytest.raises(ValueError, match=r"of shape \[3\] is sparse, but servers receive sparse gradients of"):
        servers.buffers[0].post_gradients([None, gradient])
