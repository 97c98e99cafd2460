"""A worker's connection to its servers: connection set-up, and error feedback."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricx.distributed.compression.codecs import make_codec
from fabricx.distributed.world import World
from fabricx.errors import ServerLost
from fabricx.parameter_server.connection import Connection
from fabricx.parameter_server.wire.connecting import NETWORK, READY, meet_over_gloo
from fabricx.parameter_server.wire.link import Handshake
from fabricx.parameter_server.wire.messages import PushReply, Settings
from fabricx.parameter_server.wire.partition import Piece, Shard
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker import server_locator
from fabricx.parameter_server.worker.buffers import ExchangeBuffers
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.lockstep import WorkerStep
from fabricx.parameter_server.worker.pull_timing import NoPulls
from fabricx.parameter_server.worker.servers import Servers, VectorOptions
from fabricx.strategies import ParameterServer

SIZE = 8


class Refuses:
    """A link to a server that refuses all gradients, or, with `used`, accepts them."""

    def __init__(self, *, used: bool = False) -> None:
        self.inbox, self.outbox = torch.zeros(2 * SIZE), torch.zeros(2 * SIZE)
        self.used = used

    def post(self, start: int, stop: int) -> None:
        pass

    def send(self, message: Any) -> None:
        pass

    def recv(self) -> PushReply:
        return PushReply(self.used)


def client_of(monkeypatch: pytest.MonkeyPatch, servers: int) -> Client:
    """Return a client with a single parameter; the first server refuses all gradients."""

    def meet(self: Servers, number: int, shard: Shard) -> ExchangeBuffers[Any]:
        link = Refuses(used=number > 0)
        return ExchangeBuffers(link, shard, self.parameters, make_codec("topk", keep=0.2), views=False)

    monkeypatch.setattr(Servers, "_connect", meet)
    store: Any = None
    options = VectorOptions(compression="topk", keep=0.2)
    return Client(store, "run", bytes(32), 0, [nn.Parameter(torch.zeros(SIZE))], servers, options)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client of a single server, with a single parameter."""
    return client_of(monkeypatch, 1)


def test_an_unused_gradient_does_not_change_the_error_feedback(client: Client) -> None:
    assert client.push([torch.arange(float(SIZE))])
    before = client.error_feedback[0].clone()
    assert before.any()
    assert not client.push([torch.ones(SIZE)], answered=True)
    assert torch.equal(client.error_feedback[0], before)
    assert not client.push([None], answered=True)
    assert torch.equal(client.error_feedback[0], before)


def test_a_codec_that_needs_more_bytes_than_the_gradient_is_refused() -> None:
    scalar, link = nn.Parameter(torch.zeros(1)), Refuses()
    for options in ({"codec": make_codec("int8")}, {"codec": None, "reply_codec": make_codec("int8")}):
        with pytest.raises(
            ValueError, match="Int8 needs 5 bytes for a server's 1 elements, which have 4 bytes: remove"
        ):
            ExchangeBuffers(link, Shard([Piece(0, 0, 1)]), [scalar], views=False, **options)


def test_a_missing_gradient_does_not_change_its_error_feedback() -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))]
    shard = Shard([Piece(0, 0, SIZE), Piece(1, 0, SIZE)])
    buffers = ExchangeBuffers(Refuses(), shard, parameters, make_codec("sign"), views=False)
    buffers.post_gradients([torch.arange(float(SIZE)), torch.ones(SIZE)])
    before = buffers.error_feedback[SIZE:].clone()
    assert buffers.post_gradients([torch.ones(SIZE), None]).missing == {1}
    assert torch.equal(buffers.error_feedback[SIZE:], before)


def test_powersgd_gives_a_frozen_parameter_no_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(6, 6))
    low_rank = LowRank([parameter], 1)
    parameter.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    low_rank.join(lambda: None)
    assert low_rank.state()[0]["lost"].any()
    parameter.grad = None
    low_rank.join(lambda: None)
    assert parameter.grad is None
    assert low_rank.state()[0]["lost"].any()


def test_with_unreliable_links_each_server_reports_whether_it_uses_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = client_of(monkeypatch, 2)
    client.begin(Settings(2, aggregate=False, snapshot_every=100, compression="topk", keep=0.2), None, 0)
    before = [lost.clone() for lost in client.error_feedback]
    assert not client.push([torch.arange(1.0, SIZE + 1)])  # its lease has been assigned to another worker
    assert torch.equal(client.error_feedback[0], before[0])
    assert client.error_feedback[1].any()


@pytest.mark.filterwarnings("ignore:the number of ranks has changed")
@pytest.mark.parametrize("own", [True, False])
def test_servers_use_kept_error_feedback_only_for_the_same_number_of_workers(client: Client, own: bool) -> None:
    strategy, module = ParameterServer(compression="topk"), nn.Linear(1, 1)
    strategy._use(Connection(WorkerStep(strategy._settings, several=False, low_rank=None), client))
    strategy._protocol.connect(World(), client, [], [], NoPulls())
    state = {**state_of(module), "own": None, "kept": [torch.ones(SIZE)], "lost": ()}
    strategy.load_local_states([state], module, [], own=own)
    assert bool(client.error_feedback[0].any()) == own


def state_of(module: nn.Module) -> dict[str, Any]:
    return {"module": module.state_dict(), "optimizers": []}


SECRET, SERVER = b"s" * 32, "run/server/0"


def published(generation: int) -> dist.HashStore:
    store = dist.HashStore()
    store.set(SERVER, f"{generation} {NETWORK} elsewhere:/door")
    return store


def connected(store: dist.Store) -> Client:
    return Client(store, "run", SECRET, 0, [torch.nn.Parameter(torch.zeros(2))], 1, over_gloo=True)


def test_a_worker_connects_to_the_replacement_of_a_server_that_died_before_the_connection() -> None:
    store = published(0)
    heard: list[object] = []
    hello = Handshake(0, torch.float32, 2, 2)

    def serve() -> None:
        store.wait([f"{SERVER}/0/from/1"], timedelta(seconds=60))  # the worker waits for the dead server
        store.set(SERVER, f"1 {NETWORK} elsewhere:/door")
        store.wait([f"{SERVER}/1/from/1"], timedelta(seconds=60))
        store.set(f"{SERVER}/1/from/1/{READY}", "")
        link = meet_over_gloo(store, f"{SERVER}/1/from/1/link", hello, SECRET, server=True)
        heard.append(link.recv())
        link.close()

    def work() -> None:
        connected(store).close(done=True)

    threads = [
        threading.Thread(target=serve, daemon=True),
        threading.Thread(target=work, daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert heard == [None]  # as the worker has done


def test_a_server_that_never_connects_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_locator, "RESTART_S", 0.1)
    with pytest.raises(ServerLost, match="server 0"):
        connected(published(0))
