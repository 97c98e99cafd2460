"""Finds connections that other programs have made to a process group's ports while its ranks joined.

gloo authenticates nobody: whoever connects to a rank's port at that time, with the right number, takes the place of
another rank. So each rank tells the run's store which connections it has begun, from where to where, and each
connection that a rank has accepted has to be one of those. Both ends are compared: another user's program can begin a
connection at the same address and port as a rank does, but not to the same place at the same time.
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

from fabricx.distributed.authentication import AuthenticationError

LOOK_S = 0.002
LAZY: Final = "TORCH_GLOO_LAZY_INIT"
Address = tuple[str, int]


def check_eager() -> None:
    """Refuse to let gloo connect at the first collective, when nobody looks any more at who has connected.

    Raises:
        ValueError: the environment asks for it.
    """
    if os.environ.get(LAZY, "").lower() in ("1", "y", "yes", "t", "true"):
        raise ValueError(f"{LAZY} lets ranks connect after it was checked who does (docs/security.md): unset it")


def ports() -> set[int]:
    """Return the TCP ports at which this process listens; Linux only, else none."""
    return {ours[1] for ours, theirs in _internet_sockets() if theirs is None}


def confirm(store: Any, rank: int, size: int, own: set[int], limit: timedelta, stay: Callable[[], None]) -> None:
    """Check that each connection to a group's ports comes from a rank of the group; all its ranks call it.

    Args:
        store: of the run, with a prefix of this group.
        rank, size: in the group.
        own: ports at which this rank listens for the group.
        limit: how long the others may take.
        stay: raises an error when waiting is of no use any more.

    Raises:
        AuthenticationError: on all ranks: another program has connected in the place of one.
        RuntimeError: not all ranks have answered.
    """
    connected = [(ours, theirs) for ours, theirs in _internet_sockets() if theirs is not None]
    begun = [(ours, theirs) for ours, theirs in connected if ours[1] not in own]
    deadline = time.monotonic() + limit.total_seconds()

    def told(what: str, value: Any) -> list[Any]:
        """Tell all ranks something, and return what they tell, by rank."""
        store.set(f"{what}/{rank}", json.dumps(value))
        keys = [f"{what}/{other}" for other in range(size)]
        while not store.check(keys):
            stay()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank}: not all ranks have connected within {limit}")
            time.sleep(LOOK_S)
        return [json.loads(store.get(key)) for key in keys]

    known = {(tuple(ours), tuple(theirs)) for pairs in told("begun", begun) for ours, theirs in pairs}
    strangers = [theirs for ours, theirs in connected if ours[1] in own and (theirs, ours) not in known]
    for other, found in enumerate(told("strangers", strangers)):
        if found:
            raise AuthenticationError(
                f"another program has connected to rank {other} while ranks joined, in the place of one of them, from "
                f"{', '.join(f'{host}:{port}' for host, port in found)} (docs/security.md)"
            )


def _internet_sockets() -> Iterator[tuple[Address, Address | None]]:
    """Yield both ends of each of this process's TCP connections, its own end first; None for one that listens."""
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    continue
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ends = _plain(found.getsockname()), None if listens else _plain(found.getpeername())
            yield ends


def _plain(address: tuple[Any, ...]) -> Address:
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])
