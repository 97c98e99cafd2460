"""A server serves all workers of its run, including the last to connect."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from fabricx.parameter_server.server.process import serve
from fabricx.parameter_server.wire.link import Handshake
from fabricx.parameter_server.worker import server_locator
from fabricx.parameter_server.worker.server_locator import ServerLocator

SECRET = b"k" * 32
END_S = 30.0  # a server that does not end fails the test


def test_a_server_does_not_end_before_the_last_worker_has_connected(monkeypatch: Any) -> None:
    """A worker without a batch, for example of a complete fit, may finish before other workers connect."""
    monkeypatch.setattr(server_locator, "RESTART_S", 5.0)  # otherwise a worker searches a minute for an ended server
    store: Any = dist.HashStore()
    server = threading.Thread(
        target=serve, args=(store, "run", SECRET, 0, 2), kwargs={"network": False}, name="server", daemon=True
    )
    server.start()
    first, second = (ServerLocator(store, "run", SECRET, over_gloo=False) for _ in range(2))
    handshakes = [Handshake(worker, torch.float32, 1, 1, generation=None) for worker in range(2)]
    link = first.connect(0, handshakes[0])
    link.send(None)  # it has finished
    link.close()
    server.join(0.5)  # shows the defect without hiding it: with a slow server the test ends later, and passes
    other = second.connect(0, handshakes[1])
    other.send(None)
    other.close()
    server.join(END_S)
    assert not server.is_alive()


def test_a_server_that_was_started_again_does_not_wait_for_workers_that_have_finished() -> None:
    store: Any = dist.HashStore()
    options = {"network": False, "generation": 1}
    server = threading.Thread(
        target=serve, args=(store, "run", SECRET, 0, 2), kwargs=options, name="server", daemon=True
    )
    server.start()
    link = ServerLocator(store, "run", SECRET, over_gloo=False).connect(
        0, Handshake(1, torch.float32, 1, 1, generation=None)
    )
    link.send(None)
    link.close()
    server.join(END_S)
    assert not server.is_alive()
