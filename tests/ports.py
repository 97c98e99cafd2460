"""Ports that a test names before a process of it listens at them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free TCP port that the system gives to no other process, also not for a connection, in this context.

    The socket that reserves it doesn't listen, and has SO_REUSEADDR: servers with this option, as torch's store is, may
    bind the same port. It reserves the port of all addresses: torch's store listens on all of them, which fails if
    another process has the port of a single address. A port that is only looked up is taken by another test before
    long on a busy machine.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("", 0))
        yield reserving.getsockname()[1]
