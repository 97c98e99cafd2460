"""Finds servers and connects to them, again if a server was restarted."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Final, final

from fabricx.distributed.membership.generations import membership
from fabricx.errors import ServerLost
from fabricx.parameter_server.wire.connecting import NETWORK, READY, Store, connect, meet_over_gloo
from fabricx.parameter_server.wire.link import LINK_ERRORS, Handshake, Link, SharedMemoryLink

START: Final = timedelta(minutes=5)  # maximum time for a server to start
RESTART_S: Final = 60.0  # maximum time for a server to restart


@final
class ServerLocator:
    """Connects a worker to its servers.

    Args:
        store: store in which servers publish their addresses.
        prefix: prefix of the run's keys.
        secret: key of the run.
        over_gloo: use gloo also for servers on this machine.

    Attributes:
        restarts: dead servers are restarted with the same state.
    """

    def __init__(self, store: Store, prefix: str, secret: bytes, *, over_gloo: bool) -> None:
        self.restarts = False
        self._store, self._prefix, self._secret, self._over_gloo = store, prefix, secret, over_gloo
        self._addresses: dict[int, str] = {}  # newest address of each server to which this worker has announced itself

    def connect(self, number: int, handshake: Handshake, previous: Link | None = None) -> Link:
        """Connect to a server as soon as it can be reached.

        Args:
            number: the server's number.
            handshake: introduction of this worker.
            previous: a link that has ended, whose vectors are reused.

        Raises:
            PeerLost: this worker's generation has ended.
            ServerLost: the server can't be reached; or `previous` has ended and the server's state is lost.
        """
        if previous is not None and not self.restarts:
            raise ServerLost(f"server {number} has ended, and its state is lost")
        key = f"{self._prefix}/server/{number}"
        self._store.wait([key], START)
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            _check_generation(handshake)
            with contextlib.suppress(*LINK_ERRORS):  # the server has died while connecting
                if (link := self._connect_to(self._store.get(key).decode(), number, handshake, previous)) is not None:
                    return link
            time.sleep(0.02)
        raise ServerLost(f"server {number} has ended, and was not restarted within {RESTART_S:.0f} s")

    def _connect_to(self, published: str, number: int, handshake: Handshake, previous: Link | None) -> Link | None:
        """Connect to a server at its published address; returns None if the server has ended."""
        generation, reach, address = published.split(" ", 2)
        link = None if self._over_gloo else connect(address, handshake, self._secret, previous)
        if link is not None or reach != NETWORK or isinstance(previous, SharedMemoryLink):
            return link
        if published == self._addresses.get(number):
            return None  # the address of the link that has ended: gloo would wait for the dead server
        self._addresses[number] = published
        key = f"{self._prefix}/server/{number}/{generation}/from"
        key = f"{key}/{self._store.add(key, 1)}"
        self._store.set(key, handshake.dumps(self._secret, key).hex())
        if not self._await_server(f"{key}/{READY}", published, number, handshake):
            return None
        return meet_over_gloo(self._store, f"{key}/link", handshake, self._secret, server=False, previous=previous)

    def _await_server(self, ready: str, published: str, number: int, handshake: Handshake) -> bool:
        """Wait until a server is ready to connect; returns False if the server was restarted meanwhile.

        Args:
            ready: store key that the server sets.
            published: address of the server.
            number: the server's number.
            handshake: introduction of this worker.

        Raises:
            PeerLost: this worker's generation has ended.
            ServerLost: the server has died or has not answered, and was not restarted.
        """
        deadline = time.monotonic() + RESTART_S
        while not self._store.check([ready]):
            _check_generation(handshake)
            if self._store.get(f"{self._prefix}/server/{number}").decode() != published:
                return False
            if time.monotonic() >= deadline:
                raise ServerLost(f"server {number} has not answered worker {handshake.worker} within {RESTART_S:.0f} s")
            time.sleep(0.02)
        return True


def _check_generation(handshake: Handshake) -> None:
    """Raise `PeerLost` if the workers are in lockstep and their generation has ended."""
    if handshake.generation is not None:
        membership().check(handshake.generation)
