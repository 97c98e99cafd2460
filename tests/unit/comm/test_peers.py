"""A connection that another program has made while ranks joined is found."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fabricx.comm import peers
from fabricx.comm.authentication import AuthenticationError


def confirmed(stranger: bool) -> list[Any]:
    """Let a rank accept connections of its peer and perhaps of a stranger; returns its error, if any."""
    store, found = dist.HashStore(), []
    before = peers.internet_sockets()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for begins in (True, not stranger):
            link = stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
            if not begins:  # it is not the other rank's: hidden from what this process publishes
                before |= {name: number for name, number in peers.internet_sockets().items() if number == link.fileno()}
        thread = threading.Thread(target=_other, args=(store,))
        thread.start()
        try:
            peers.confirm(store, 0, 2, before, timedelta(seconds=20), lambda: None)
        except AuthenticationError as error:
            found.append(error)
        thread.join()
    return found


def _other(store: Any) -> None:
    store.set("begins/1", "[]")


def test_a_connection_of_a_stranger_is_an_error_and_those_of_ranks_are_not() -> None:
    assert confirmed(stranger=False) == []
    assert "another program has connected" in str(confirmed(stranger=True)[0])


def test_a_rank_that_does_not_answer_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="not all ranks have connected"):
        peers.confirm(dist.HashStore(), 0, 2, {}, timedelta(seconds=0), lambda: None)
