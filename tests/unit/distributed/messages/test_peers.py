"""All ranks detect a connection that another program has made during the rendezvous."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabricx.distributed.messages import peers
from fabricx.distributed.messages.authentication import AuthenticationError
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from fabricx.launch.supervisor import run_workers
from fabricx.parameter_server.wire.connecting import meet_over_gloo
from fabricx.parameter_server.wire.link import Handshake

LIMIT = timedelta(seconds=20)
STRANGER = """
import socket, sys
source, *ports = map(int, sys.argv[1:])
links = []
for port in ports:
    for number in range(1 if source else 3):  # as which gloo tells connections apart
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if source:
            link.bind(("127.0.0.1", source))
        link.connect(("127.0.0.1", port))
        link.sendall(number.to_bytes(8, "little"))
        links.append(link)
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(ports: set[int], source: int = 0) -> Iterator[None]:
    """Connect another program to the ports, from the address `source` if it is set."""
    command = [sys.executable, "-ISc", STRANGER, str(source), *map(str, sorted(ports))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "connected\n"
        try:
            yield
        finally:
            program.stdin.close()


def listened(others: set[int]) -> set[int]:
    """Wait until this process listens at new ports; returns these ports."""
    deadline = time.monotonic() + 20
    while not (opened := peers.ports() - others):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return opened


def both(call: Callable[[int], Any], between: Callable[[], Any] = lambda: None) -> list[str]:
    """Call a function as rank 0, then `between`, then the function as rank 1; returns the errors."""
    errors = []

    def catch(rank: int) -> None:
        try:
            call(rank)
        except (AuthenticationError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    first = threading.Thread(target=catch, args=(0,))
    first.start()
    between()
    catch(1)
    first.join()
    return errors


@pytest.mark.parametrize("attack", ["none", "any", "same source"])
def test_an_unexpected_connection_is_an_error_of_all_ranks_also_from_the_address_of_a_rank(attack: str) -> None:
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:
        listener, other = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        link = stack.enter_context(socket.socket())
        link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gloo does
        link.bind(("127.0.0.1", 0))
        link.connect(other.getsockname())  # for a rank that is not attacked
        stack.enter_context(other.accept()[0])
        if attack != "none":
            stack.enter_context(
                stranger({listener.getsockname()[1]}, link.getsockname()[1] if attack == "same source" else 0)
            )
            stack.enter_context(listener.accept()[0])
        own_ports = ({listener.getsockname()[1]}, {other.getsockname()[1]})
        errors = both(lambda rank: peers.confirm(store, rank, 2, own_ports[rank], LIMIT, lambda: None))
    text = "AuthenticationError: another program has connected to rank 0"
    assert [error[: len(text)] for error in errors] == ([] if attack == "none" else [text, text])


def test_a_rank_that_does_not_answer_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="not all ranks have connected"):
        peers.confirm(dist.HashStore(), 0, 2, set(), timedelta(seconds=0), lambda: None)


def test_a_rank_whose_group_is_over_publishes_no_connections() -> None:
    """Shut the connections of the group: otherwise other ranks would report the remaining connections as foreign."""
    store = dist.HashStore()

    def stay() -> None:
        raise PeerLost("over")

    with pytest.raises(PeerLost, match="over"):
        peers.confirm(store, 0, 2, set(), LIMIT, stay)
    assert not store.check(["begun/0"])


@pytest.mark.parametrize("attacked", [False, True])
def test_a_gloo_link_to_a_server_is_refused_at_both_ends_if_another_program_has_connected(attacked: bool) -> None:
    store, others, links = dist.HashStore(), peers.ports(), []
    with contextlib.ExitStack() as stack:

        def meet(rank: int) -> None:
            links.append(meet_over_gloo(store, "link", Handshake(0, torch.float32, 2, 2), b"k" * 32, server=rank == 0))

        attack = (lambda: stack.enter_context(stranger(listened(others)))) if attacked else (lambda: None)
        errors = both(meet, attack)
    text = "AuthenticationError: another program has connected to rank 1"
    assert [error[: len(text)] for error in errors] == ([text, text] if attacked else [])
    assert len(links) == (0 if attacked else 2)


def builds_groups(world: World, attacked: str) -> str:
    """Build the main group and a second group; a foreign program connects to rank 0 while `attacked` is built."""
    store = world.store
    assert store is not None

    def build(name: str, group: Callable[[], Any]) -> None:
        if name != attacked:
            group()
        elif world.rank == 1:
            store.wait(["attacked"], LIMIT)
            group()
        else:
            others = peers.ports()

            def attack() -> None:
                attacker.enter_context(stranger(listened(others)))
                store.set("attacked", "")

            with contextlib.ExitStack() as attacker:
                thread = threading.Thread(target=attack)
                thread.start()
                try:
                    group()
                finally:
                    thread.join()

    try:
        build("main", world.join)
        build("beside", lambda: world.new_subgroup([[0, 1]]))
    except AuthenticationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attacked", ["main", "beside", "none"])
def test_an_attacked_group_is_an_error_of_all_its_ranks(attacked: str) -> None:
    text = "" if attacked == "none" else "another program has connected to rank 0"
    assert [error[: len(text) or None] for error in run_workers(builds_groups, (attacked,), size=2)] == [text, text]


def test_connections_opened_after_the_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.LAZY, "1")
    with pytest.raises(ValueError, match="unset it"):
        World(size=2, store=dist.HashStore(), secret=b"k" * 32).join()
