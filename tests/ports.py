"""Ports that a test chooses before its processes listen on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free TCP port that the system assigns to no other process or connection within this context.

    The reserving socket doesn't listen, and has SO_REUSEADDR: servers with this option, such as torch's store, may bind
    the same port. It reserves the port on all addresses: torch's store listens on all addresses, which fails if another
    process has the port on a single address. A port that is queried without a reservation is soon used by another test
    on a busy machine.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("", 0))
        yield reserving.getsockname()[1]
