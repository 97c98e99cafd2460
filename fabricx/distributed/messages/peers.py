"""Detect connections of foreign programs to the ports of a gloo process group while its ranks connect.
gloo does not authenticate: any program that connects to a rank's port during set-up, with the right number, replaces
another rank. Therefore each rank publishes both addresses of every connection that it has opened in the run's store,
and every accepted connection must be in that list. Both addresses are compared: a program of another user can open a
connection from the same address and port as a rank, but not to the same destination at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

from fabricx.distributed.messages.authentication import AuthenticationError

LOOK_S = 0.002
LAZY: Final = "TORCH_GLOO_LAZY_INIT"
Address = tuple[str, int]


def check_eager() -> None:
    """Refuse lazy connections of gloo, which are opened at the first collective, after the check of connections.

    Raises:
        ValueError: the environment variable `TORCH_GLOO_LAZY_INIT` is set.
    """
    if os.environ.get(LAZY, "").lower() in ("1", "y", "yes", "t", "true"):
        raise ValueError(f"{LAZY} lets ranks connect after connections were checked (docs/security.md): unset it")


def ports() -> set[int]:
    """Return the TCP ports at which this process listens; empty on systems other than Linux."""
    return {ours[1] for ours, theirs in _internet_sockets() if theirs is None}


def confirm(store: Any, rank: int, size: int, listening: set[int], limit: timedelta, stay: Callable[[], None]) -> None:
    """Check that every connection to a group's ports belongs to a rank of the group; all ranks of the group call it.

    Args:
        store: the run's store, with a prefix for this group.
        rank, size: rank of this process in the group and number of ranks.
        listening: ports at which this rank listens for the group.
        limit: maximum time to wait for the other ranks.
        stay: raises an error if the group is no longer valid; called while waiting.

    Raises:
        AuthenticationError: on all ranks: a foreign program has connected in place of a rank.
        RuntimeError: not all ranks have answered within `limit`.
    """
    connected = [(ours, theirs) for ours, theirs in _internet_sockets() if theirs is not None]
    stay()  # connections of a group that is over are shut down, and others would take their ends for foreign
    begun = [(ours, theirs) for ours, theirs in connected if ours[1] not in listening]
    deadline = time.monotonic() + limit.total_seconds()

    def exchange(what: str, value: Any) -> list[Any]:
        """Publish a value in the store and return the values of all ranks, by rank."""
        store.set(f"{what}/{rank}", json.dumps(value))
        keys = [f"{what}/{other}" for other in range(size)]
        while not store.check(keys):
            stay()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {rank}: not all ranks have connected within {limit}; see the output of the other processes"
                )
            time.sleep(LOOK_S)
        return [json.loads(store.get(key)) for key in keys]

    expected = {(tuple(ours), tuple(theirs)) for pairs in exchange("begun", begun) for ours, theirs in pairs}
    strangers = [theirs for ours, theirs in connected if ours[1] in listening and (theirs, ours) not in expected]
    for other, addresses in enumerate(exchange("strangers", strangers)):
        if addresses:
            raise AuthenticationError(
                f"another program has connected to rank {other} while ranks joined, in place of another rank, from "
                f"{', '.join(f'{host}:{port}' for host, port in addresses)} (docs/security.md)"
            )


def _internet_sockets() -> Iterator[tuple[Address, Address | None]]:
    """Yield (local, remote) address of each TCP socket of this process; remote is None for a listening socket."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as opened:
                if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
                    continue
                listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ends = _plain(opened.getsockname()), None if listens else _plain(opened.getpeername())
            yield ends


def _plain(address: tuple[Any, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])
