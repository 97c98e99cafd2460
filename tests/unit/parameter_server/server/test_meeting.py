"""A worker meets a server over gloo: a server that dies before it ends the wait."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fabricx.errors import ServerLost
from fabricx.parameter_server.wire.channel import NETWORK, READY, Handshake, meet_over_gloo
from fabricx.parameter_server.worker import client as client_module
from fabricx.parameter_server.worker.client import Client

SECRET, SERVER = b"s" * 32, "run/server/0"


def published(generation: int) -> dist.HashStore:
    store = dist.HashStore()
    store.set(SERVER, f"{generation} {NETWORK} elsewhere:/door")
    return store


def connected(store: dist.Store) -> Client:
    return Client(store, "run", SECRET, 0, [torch.nn.Parameter(torch.zeros(2))], 1, over_gloo=True)


def test_a_worker_meets_the_server_that_replaces_one_that_died_before_the_meeting() -> None:
    store = published(0)
    heard: list[object] = []
    hello = Handshake(0, torch.float32, 2, 2)

    def serve() -> None:
        store.wait([f"{SERVER}/0/from/1"], timedelta(seconds=60))  # the worker waits for the server that has died
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
    assert heard == [None]  # that the worker has done


def test_a_server_that_never_meets_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESTART_S", 0.1)
    with pytest.raises(ServerLost, match="server 0"):
        connected(published(0))


def test_the_meeting_itself_has_a_limit() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        meet_over_gloo(dist.HashStore(), "link", Handshake(0, torch.float32, 2, 2), SECRET, server=False,
                       timeout=timedelta(seconds=0.2))  # fmt: skip
    assert time.monotonic() - began < 30.0  # the default is 20 s, and it was a year
