"""What compression has kept for later gradients, where a gradient isn't used or the number of ranks changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.codecs import make_codec
from fabricx.distributed.compressed_buckets import LowRankAverager
from fabricx.distributed.world import World
from fabricx.parameter_server.wire.messages import Pushed, Settings
from fabricx.parameter_server.worker.buffers import ExchangeBuffers
from fabricx.parameter_server.worker.client import Client
from fabricx.strategies import DDP, ParameterServer

SIZE = 8


class Refuses:
    """A link to a server that uses no gradient, or, with `used`, each."""

    def __init__(self, *, used: bool = False) -> None:
        self.inbox, self.outbox = torch.zeros(2 * SIZE), torch.zeros(2 * SIZE)
        self.used = used

    def post(self, start: int, stop: int) -> None:
        pass

    def send(self, message: Any) -> None:
        pass

    def recv(self) -> Pushed:
        return Pushed(self.used)


def client_of(monkeypatch: pytest.MonkeyPatch, servers: int) -> Client:
    """Return a client with one parameter; the first server refuses all gradients."""

    def meet(self: Client, number: int) -> ExchangeBuffers[Any]:
        link = Refuses(used=number > 0)
        return ExchangeBuffers(link, self._shards[number], self._parameters, make_codec("topk", keep=0.2), views=False)

    monkeypatch.setattr(Client, "_connect", meet)
    store: Any = None
    return Client(store, "run", bytes(32), 0, [nn.Parameter(torch.zeros(SIZE))], servers, compression="topk")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client of one server, with one parameter."""
    return client_of(monkeypatch, 1)


def test_a_gradient_that_is_not_used_changes_nothing_of_what_was_kept(client: Client) -> None:
    assert client.push([torch.arange(float(SIZE))])
    before = client.kept[0].clone()
    assert before.any()
    assert not client.push([torch.ones(SIZE)], answered=True)
    assert torch.equal(client.kept[0], before)
    assert not client.push([None], answered=True)
    assert torch.equal(client.kept[0], before)


def test_where_a_link_may_be_cut_each_server_says_whether_it_uses_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, 2)
    client.begin(Settings(2, aggregate=False, snapshot_every=100, compression="topk", keep=0.2), None, 0)
    before = [lost.clone() for lost in client.kept]
    assert not client.push([torch.arange(1.0, SIZE + 1)])  # its lease is another worker's since
    assert torch.equal(client.kept[0], before[0])
    assert client.kept[1].any()


@pytest.mark.filterwarnings("ignore:the number of ranks has changed")
@pytest.mark.parametrize("own", [True, False])
def test_servers_go_on_with_what_workers_have_kept_only_for_as_many_workers(client: Client, own: bool) -> None:
    strategy, module = ParameterServer(compression="topk"), nn.Linear(1, 1)
    strategy._client, strategy._protocol = client, strategy._lockstep_protocol(None, False)
    strategy._protocol.begin(World(), client, [], [])
    state = {**state_of(module), "own": None, "kept": [torch.ones(SIZE)], "lost": ()}
    strategy.load_own_states([state], module, [], own=own)
    assert bool(client.kept[0].any()) == own


def test_thin_matrices_are_the_same_on_all_ranks_of_another_number(recwarn: pytest.WarningsRecorder) -> None:
    strategy, module = DDP(compression="powersgd"), nn.Linear(SIZE, SIZE)
    sums = strategy._thin = LowRankAverager(dict(module.named_parameters()), 1)
    kept = {"weight": {"lost": torch.ones(SIZE, SIZE), "basis": torch.ones(SIZE, 1)}}
    state = {**state_of(module), "own": kept}
    strategy.load_own_states([state], module, [], own=True)
    assert sums.state()["weight"]["lost"].all()
    assert not recwarn.list
    strategy.load_own_states([state], module, [], own=False)
    assert not sums.state()["weight"]["lost"].any()
    assert sums.state()["weight"]["basis"].all()
    assert "the compression errors of gradients are dropped" in str(recwarn.pop().message)


def state_of(module: nn.Module) -> dict[str, Any]:
    return {"module": module.state_dict(), "optimizers": []}
