"""Connections of a group end without a failed write, and no other connection ends."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace

import pytest

from fabricx.distributed.membership.group_connections import GroupConnections


def opening(store: int) -> GroupConnections:
    connections = GroupConnections(SimpleNamespace(port=store), silent=False)
    connections.opening()
    return connections


def test_reads_end_and_writes_continue_until_the_connections_are_released() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = socket.create_connection(listener.getsockname())
        before_peer = listener.accept()[0]
        connections = opening(store=1)
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
        connections.opened()
        for link in (before, before_peer, ours, theirs):
            link.settimeout(5)
        connections.interrupt()
        assert ours.recv(1) == b""
        ours.sendall(b"written")
        ours.close()  # as gloo does when it has read the end
        for _ in range(3):
            theirs.sendall(b"also written")
        assert theirs.recv(100) == b"written"
        before_peer.sendall(b"other")
        assert before.recv(100) == b"other"
        connections.interrupt()
        connections.release()
        with contextlib.suppress(ConnectionError):
            theirs.sendall(b"answered by a reset")
        with pytest.raises(ConnectionError):
            theirs.sendall(b"fails")
        for link in (before, before_peer, theirs):
            link.close()


def test_the_store_and_later_connections_are_not_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = opening(store=listener.getsockname()[1])
        store = socket.create_connection(listener.getsockname())
        store_peer = listener.accept()[0]
        connections.opened()
        ours, theirs = socket.socketpair()
        connections.interrupt()
        store_peer.sendall(b"from the store")
        theirs.sendall(b"later")
        assert store.recv(100) == b"from the store"
        assert ours.recv(100) == b"later"
        connections.release()
        for link in (store, store_peer, ours, theirs):
            link.close()
