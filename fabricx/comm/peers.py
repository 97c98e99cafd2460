"""Finds connections that other programs have made to a process group's ports while its ranks joined.

gloo authenticates nobody: whoever connects to a rank's port at that time, with the right number, takes the place of
another rank. So each rank tells the run's store at which addresses its connections begin, and each connection that it
has accepted has to begin at one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fabricx.comm.authentication import AuthenticationError

LOOK_S = 0.002


def internet_sockets() -> dict[str, int]:
    """Return this process's TCP sockets: number of the file by a name that no other has; Linux only, else none."""
    found = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def confirm(
    store: Any, rank: int, size: int, before: dict[str, int], limit: timedelta, stay: Callable[[], None]
) -> None:
    """Check that each connection accepted since `before` comes from a rank of the group; all ranks call it.

    Args:
        store: of the run, with a prefix of this group.
        rank, size: in the group.
        before: what `internet_sockets` returned before the group was built.
        limit: how long the others may take.
        stay: raises an error when waiting is of no use any more.

    Raises:
        AuthenticationError: another program has connected in the place of a rank.
        RuntimeError: not all ranks have answered.
    """
    begins, accepted = _addresses(set(internet_sockets()) - set(before))
    store.set(f"begins/{rank}", json.dumps(begins))
    keys = [f"begins/{other}" for other in range(size)]
    deadline = time.monotonic() + limit.total_seconds()
    while not store.check(keys):
        stay()
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank}: not all ranks have connected within {limit}")
        time.sleep(LOOK_S)
    known = {tuple(address) for key in keys for address in json.loads(store.get(key))}
    if strangers := [address for address in accepted if address not in known]:
        raise AuthenticationError(
            f"rank {rank}: another program has connected to this rank while ranks joined, in the place of one of them, "
            f"from {', '.join(f'{host}:{port}' for host, port in strangers)} (docs/security.md)"
        )


def _addresses(names: set[str]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return at which addresses connections begin here, and where those begin that this process has accepted."""
    listening, connected = set(), []
    for name, number in internet_sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            if name not in names or found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ours = _plain(found.getsockname())
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(ours[1])
            else:
                connected.append((ours, _plain(found.getpeername())))
    begins = [ours for ours, _ in connected if ours[1] not in listening]
    return begins, [theirs for ours, theirs in connected if ours[1] in listening]


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(address[1])
