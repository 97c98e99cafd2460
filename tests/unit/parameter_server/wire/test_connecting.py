"""A man in the middle can read messages to a run's store, and cannot change, repeat or add messages."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fabricx.distributed.messages.authentication import KEY_BYTES, TAG_BYTES, tag
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.parameter_server.wire.connecting import LinkListener, connect, meet_over_gloo
from fabricx.parameter_server.wire.link import Handshake

KEY = b"k" * 32
TO_SERVER, TO_CLIENT = "to server", "to client"
Change = Callable[[str, int, bytes], list[bytes]]  # by index of a message and direction: the replacement


def exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def passes_on(direction: str, source: socket.socket, target: socket.socket, change: Change) -> None:
    """Forward messages of a side; the first message, its proof, is unchanged."""
    with contextlib.suppress(OSError, EOFError):
        for size in (KEY_BYTES, TAG_BYTES):
            target.sendall(exactly(source, size))
        number = 0
        while True:
            message = exactly(source, int.from_bytes(exactly(source, 4), "big"))
            for changed in change(direction, number, message):
                target.sendall(len(changed).to_bytes(4, "big") + changed)
            number += 1
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def man_in_the_middle(port: int, change: Change) -> Iterator[int]:
    """Forward connections to a port; yields the address."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads: list[threading.Thread] = []
        sockets: list[socket.socket] = [listener]

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client = stack.enter_context(listener.accept()[0])
                    server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    sockets.extend([client, server])
                    for ends in ((TO_SERVER, client, server), (TO_CLIENT, server, client)):
                        threads.append(threading.Thread(target=passes_on, args=(*ends, change)))
                        threads[-1].start()

        threads.append(threading.Thread(target=run))
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            for connection in sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES: dict[str, Change] = {
    "a byte of a request": lambda way, n, data: [flipped(data, -1) if (way, n) == (TO_SERVER, 1) else data],
    "a byte of its tag": lambda way, n, data: [flipped(data, 0) if (way, n) == (TO_SERVER, 1) else data],
    "a byte of an answer": lambda way, n, data: [flipped(data, -1) if (way, n) == (TO_CLIENT, 1) else data],
    "repeated": lambda way, n, data: [data] * (2 if (way, n) == (TO_SERVER, 0) else 1),
}


def add_thrice(store: PrivateStore) -> None:
    for _ in range(3):
        store.add("a", 1)


@pytest.mark.parametrize("kind", CHANGES)
def test_an_altered_message_ends_the_connection_and_changes_no_value(kind: str) -> None:
    server = StoreServer(None, KEY)
    try:
        with man_in_the_middle(server.port, CHANGES[kind]) as port:
            store = PrivateStore(("127.0.0.1", port), KEY)
            with pytest.raises(dist.DistNetworkError, match="connection to the run's store was lost"):
                add_thrice(store)
    finally:
        server.close()
    assert server._state._values == {"a": b"2" if kind == "a byte of an answer" else b"1"}


def test_messages_recorded_on_a_connection_are_refused_on_another_connection() -> None:
    server, recorded = StoreServer(None, KEY), []

    def record(direction: str, number: int, message: bytes) -> list[bytes]:
        if direction == TO_SERVER:
            recorded.append(message)
        return [message]

    def replay(direction: str, number: int, message: bytes) -> list[bytes]:
        return [recorded[0]] if direction == TO_SERVER else [message]

    try:
        with man_in_the_middle(server.port, record) as port:
            PrivateStore(("127.0.0.1", port), KEY).add("a", 1)
        with man_in_the_middle(server.port, replay) as port, pytest.raises(dist.DistNetworkError):
            PrivateStore(("127.0.0.1", port), KEY).add("b", 1)
    finally:
        server.close()
    assert server._state._values == {"a": b"1"}


SECRET, SERVER = b"s" * 32, "run/server/0"


def test_the_connection_set_up_has_a_time_limit() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        meet_over_gloo(dist.HashStore(), "link", Handshake(0, torch.float32, 2, 2), SECRET, server=False,
                       timeout=timedelta(seconds=0.2))  # fmt: skip
    assert time.monotonic() - began < 30.0  # the default is 20 s; it was a year before


def test_a_server_accepts_workers_after_a_reset_connection(tmp_path: Path) -> None:
    """A worker that dies before it has read the server's proof resets its connection, instead of closing it."""
    listener = LinkListener(KEY, str(tmp_path))
    path = listener.address.partition(":")[2]

    def die() -> None:
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            theirs, ours = exactly(worker, KEY_BYTES), b"o" * KEY_BYTES
            worker.sendall(ours + tag(KEY, ["client"], theirs + ours))
            select.select([worker], [], [])

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(EOFError):
        listener.accept()
    thread.join()
    links = []
    thread = threading.Thread(
        target=lambda: links.append(connect(listener.address, Handshake(0, torch.float32, 4, 4), KEY))
    )
    thread.start()
    accepted = listener.accept()
    thread.join()
    for link in (accepted, links[0]):
        link.close()
    listener.close()
    with pytest.raises(OSError, match=r"accepts no more|Bad file|Invalid"):
        listener.accept()
