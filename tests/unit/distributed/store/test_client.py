"""The store of a run implements torch's store interface, for processes with the key."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.authentication import new_key
from fabricx.distributed.store import server as store_server
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import SOCKET, UNPROVEN, StoreServer
from fabricx.distributed.store.state import pack, unpack

KEY = b"k" * 32
ROOT = Path(__file__).parents[3]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / ("long" * 40)  # longer than the maximum path of a Unix socket
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(params=["on one machine", "over a network"])
def server(private: Path, request: pytest.FixtureRequest) -> Any:
    server = StoreServer(str(private) if request.param == "on one machine" else None, KEY)
    yield server
    server.close()


def address(server: StoreServer) -> Any:
    return server.path or ("127.0.0.1", server.port)


def test_the_private_store_implements_torchs_store_interface(server: StoreServer) -> None:
    store = PrivateStore(address(server), KEY)
    prefixed = dist.PrefixStore("run", store)
    prefixed.set("binary", b"\0\xff".decode("latin1"))
    assert store.get("run/binary") == "\0\xff".encode()
    store.set("bytes", b"\0\xff")
    assert store.get("bytes") == b"\0\xff"
    assert [prefixed.add("count", 2), prefixed.add("count", -3)] == [2, -1]
    assert prefixed.check(["binary", "count"])
    assert not prefixed.check(["binary", "missing"])
    assert store.compare_set("run/once", "", "1") == b"1"
    assert store.compare_set("run/once", "0", "2") == b"1"
    assert prefixed.delete_key("once")
    assert not prefixed.delete_key("once")
    assert [store.delete_key("bytes", "other"), store.check(["bytes"])] == [False, False]
    with pytest.raises(RuntimeError, match=r"wait timeout after 0\.01 s, keys: run/missing"):
        prefixed.wait(["missing"], timedelta(seconds=0.01))


def test_a_thread_that_waits_in_the_private_store_does_not_block_other_threads(server: StoreServer) -> None:
    store = PrivateStore(address(server), KEY)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(store.get("later")))
    thread.start()
    assert store.add("steps", 1) == 1
    server.set("later", b"now")
    thread.join()
    assert received == [b"now"]


def test_the_private_store_refuses_clients_without_the_key(server: StoreServer) -> None:
    with pytest.raises(RuntimeError, match="can't be reached"):
        PrivateStore(address(server), new_key())
    assert not PrivateStore(address(server), KEY).check(["stop/requested"])  # other clients continue


def test_malformed_requests_and_processes_that_end_while_waiting_do_not_affect_other_clients(
    server: StoreServer,
) -> None:
    store, other = PrivateStore(address(server), KEY), PrivateStore(address(server), KEY)
    for request in ((b"add", b"count", b"x"), (b"unknown",), (b"wait", b"1"), (b"set",)):
        with pytest.raises(dist.DistNetworkError):
            store._request(*request)
    for number in range(50):  # with and without the key
        connection = other._connected()
        connection.send_bytes(pack(b"wait", b"60", b"1", f"key {number % 2}".encode()))
        connection.close()
        store.set(f"key {number % 2}", "")
        store.delete_key("key 1")
    assert store.check(["key 0"])
    while server._state._waits:  # until the server has read the end of the last connection
        time.sleep(0.001)


def test_a_long_wait_and_an_invalid_number_do_not_end_other_waits(server: StoreServer) -> None:
    store, other = PrivateStore(address(server), KEY), PrivateStore(address(server), KEY)
    received: list[Any] = []
    threads = [
        threading.Thread(target=lambda: received.append(store.wait(["late"], timedelta(days=365)))),
        threading.Thread(target=lambda: received.append(store.reach({"count": 1}, 60.0))),
    ]
    for thread in threads:
        thread.start()
    while len(server._state._waits) < 2:
        time.sleep(0.001)
    other.set("count", "none")
    other.set("count", "1")
    other.set("late", "")
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, received)) == ["None", "['count']"]


def test_a_watch_ends_when_a_key_is_set_or_when_it_is_interrupted(server: StoreServer) -> None:
    watch, received = PrivateStore(address(server), KEY).watch(), []

    def wait() -> None:
        while not received or received[-1]:
            received.append(watch.wait_any(["a", "b"], 60.0))
            server._state._values.clear()

    thread = threading.Thread(target=wait)
    thread.start()
    for key in ("a", "b"):
        server.set(key, b"")
        while [key] not in received:
            time.sleep(0.001)
    watch.interrupt()
    thread.join(60)
    assert received == [["a"], ["b"], []]
    watch.interrupt()  # before the wait
    assert watch.wait_any(["a"], 60.0) == []
    server.set("a", b"")
    assert watch.wait_any(["a"], 60.0) == ["a"]
    assert watch.wait_any(["c"], 0.0) == []
    watch.close()


def test_numbers_only_increase_and_can_be_awaited(server: StoreServer) -> None:
    store, other = PrivateStore(address(server), KEY), PrivateStore(address(server), KEY)
    for number in (3, 2):
        store.raise_to("passed", number)
    assert store.get("passed") == b"3"
    assert store.reach({"passed": 3, "want": 2}, 60.0) == ["passed"]
    assert store.reach({"passed": 4, "want": 2}, 0.01) == []
    thread = threading.Thread(target=lambda: [other.add("want", 1) for _ in range(2)])
    thread.start()
    assert store.reach({"passed": 4, "want": 2}, 60.0) == ["want"]
    thread.join()


def test_a_process_that_reads_no_answer_does_not_block_other_processes(server: StoreServer) -> None:
    store = PrivateStore(address(server), KEY)
    store.set("large", b"x" * (1 << 22))
    lazy = store._connected()
    lazy.send_bytes(pack(b"wait", b"60", b"1", b"large"))
    store.set("small", "")
    assert store.get("small") == b""
    assert unpack(lazy.recv_bytes()) == [b"large", b"x" * (1 << 22)]
    lazy.close()


def test_closing_a_private_store_ends_its_waits(private: Path) -> None:
    server = StoreServer(str(private), KEY)
    store = PrivateStore(server.path, KEY)
    errors: list[RuntimeError] = []

    def wait() -> None:
        try:
            store.wait(["never"], timedelta(minutes=5))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    store.set("seen", "")
    server.close()
    thread.join(10)
    assert len(errors) == 1


def opened(server: StoreServer, count: int) -> list[socket.socket]:
    """Return connections that have not proved the key."""
    if not server.path:
        return [socket.create_connection(address(server)) for _ in range(count)]
    peers = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    folder = os.open(os.path.dirname(server.path), os.O_RDONLY)
    for peer in peers:
        peer.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # the path is too long
    os.close(folder)
    return peers


def test_many_processes_that_connect_at_the_same_time_are_all_served(server: StoreServer) -> None:
    peers = opened(server, UNPROVEN + 100)
    time.sleep(0.1)  # the server accepts a limited number
    for peer in peers:
        authentication._prove(peer, KEY, "the server")
        peer.close()


def test_programs_without_the_key_do_not_block_other_clients(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "PROOF_S", 0.2)
    peers = opened(server, UNPROVEN + 10)
    PrivateStore(address(server), KEY).set("a", "")
    assert server.get("a") == b""
    for peer in peers:
        peer.close()


ENDS = """
import os, signal, sys
from fabricx.distributed.store.client import PrivateStore
place = sys.argv[1] or ("127.0.0.1", int(sys.argv[2]))
PrivateStore(place, b"k" * 32).push_at_end("gone", "7", soon=True)
print("set", flush=True)
sys.stdin.read()
"""


def test_a_sequence_is_extended_when_its_registered_process_ends(server: StoreServer) -> None:
    store = PrivateStore(address(server), KEY)
    command = [sys.executable, "-c", ENDS, server.path, str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        server.push("gone", b"3")
        assert not store.check(["gone/1"])
        process.kill()
        store.wait(["gone/1"], timedelta(seconds=60))
    assert store.values(["gone/1", "gone/0"]) == [b"7", b"3"]
    with pytest.raises(RuntimeError, match="wait timeout"):
        store.values(["gone/0", "gone/2"])
