"""Server of a run's key-value store, for processes with the run's key only; does not import torch."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import Final, cast, final

from fabricx.distributed.messages import authentication
from fabricx.distributed.store.connections import Channel, Peer, end, shut
from fabricx.distributed.store.state import StoreState

SOCKET: Final = "store"  # name of the Unix socket in the run's folder
UNPROVEN: Final = 512  # maximum connections before authentication; further connections wait to be accepted
PROOF_S: Final = 2.0  # age after which such a connection is closed in favour of one that waits
BACKLOG: Final = 1 << 14  # connections that wait to be accepted, as when all ranks of a launch start together
LONGEST_S: Final = 3600.0  # longest sleep of the thread; the selector has a limit
_AGAIN_S: Final = 0.1  # pause after a connection that could not be accepted
_WAKES: Final = 1 << 16  # bytes of the pipe that are read at a time


@final
class StoreServer:
    """Serves a store to the processes of a run, in a single thread for any number of connections.

    A process that waits for a key sends one request and receives one answer, when the key is set: it does not poll.

    Args:
        folder: the run's private folder for the Unix socket; None to listen on the network, where each message is
            signed.
        key: secret of the run; connections without proof of the key are closed.

    Attributes:
        path: path of the Unix socket; "" on the network.
        port: TCP port on the network, else 0.
    """

    def __init__(self, folder: str | None, key: bytes) -> None:
        self.path, self.port = "", 0
        if folder is None:
            self._listener = authentication.listen_on_network(BACKLOG)
            self.port = self._listener.getsockname()[1]
        else:
            self._listener = authentication.listen(folder, SOCKET, BACKLOG)
            self.path = os.path.join(folder, SOCKET)
        self._listener.setblocking(False)
        self._key = key
        self._state = StoreState()
        self._lock = threading.RLock()  # reentrant: a signal handler may set a value
        self._closed = False
        self._admitted: deque[Channel] = deque()
        self._unproven: deque[tuple[socket.socket, float]] = deque()  # with the times at which they were accepted
        self._pause_ends: float | None = None  # when connections are accepted again
        self._crowded = False  # they are accepted again before if a connection is authenticated
        self._peers: dict[int, Peer] = {}  # by file descriptor
        self._woken, self._wakes = os.pipe()
        for number in (self._woken, self._wakes):
            os.set_blocking(number, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fabricx-store", daemon=True)
        self._thread.start()

    @property
    def requests(self) -> int:
        """Return the number of requests that were served."""
        return self._state.requests

    @property
    def used(self) -> bool:
        """Return whether a process is connected."""
        return bool(self._peers)

    def set(self, key: str, value: bytes) -> None:
        """Set a value, in the process that hosts the store.

        Args:
            key: key of the value.
            value: any bytes.
        """
        self._state.set(key, value)
        self._wake()

    def push(self, name: str, value: bytes) -> None:
        """Append a value to a sequence, in the process that hosts the store.

        Args:
            name: name of the sequence; see `PrivateStore.push_at_end`.
            value: any bytes.
        """
        self._state.push(name, value)
        self._wake()

    def get(self, key: str) -> bytes | None:
        """Return a value, in the process that hosts the store; None if the key does not exist.

        Args:
            key: key of the value.
        """
        return self._state.get(key)

    def has(self, key: str) -> bool:
        """Return whether a key exists.

        Args:
            key: any key.
        """
        return self._state.get(key) is not None

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            for peer, _ in self._unproven:
                with contextlib.suppress(OSError):  # it has ended
                    peer.shutdown(socket.SHUT_RDWR)
        self._wake()
        self._thread.join()
        with self._lock:
            numbers, self._woken, self._wakes = (self._woken, self._wakes), -1, -1
        for number in numbers:
            if number >= 0:
                os.close(number)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # the thread is awake already
            if self._wakes >= 0:
                os.write(self._wakes, b".")

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, events in self._selector.select(self._next_deadline()):
                    if key.fd == self._woken:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._woken, _WAKES)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif (peer := self._peers.get(key.fd)) is not None:
                        self._attend(peer, events)
                if self._pause_ends is not None and (time.monotonic() >= self._pause_ends or self._has_place):
                    self._pause_ends = None
                    self._selector.register(self._listener, selectors.EVENT_READ)
                while self._admitted:
                    self._add(self._admitted.popleft())
                self._settle()
        finally:
            with self._lock:
                self._closed = True
                channels = [*(peer.channel for peer in self._peers.values()), *self._admitted]
                self._peers.clear()
            self._selector.close()
            shut(self._listener.fileno())  # a forked process may have a copy of it, as of the connections
            self._listener.close()
            for channel in channels:
                end(channel)

    def _next_deadline(self) -> float | None:
        """Return the seconds until the next request reaches its timeout; None without such a request."""
        deadlines = [at for at in (self._state.next_deadline(), self._pause_ends) if at is not None]
        return min(LONGEST_S, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None

    @property
    def _has_place(self) -> bool:
        """Return whether a connection can be accepted that had to wait for the proof of others."""
        return self._crowded and len(self._unproven) < UNPROVEN

    def _accept(self) -> None:
        self._crowded = not self._make_place()
        if self._crowded:
            return
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of file descriptors: serve the open connections meanwhile
            self._pause(time.monotonic() + _AGAIN_S)
            return
        peer.setblocking(True)
        unproven = peer, time.monotonic()
        with self._lock:
            self._unproven.append(unproven)
        try:
            threading.Thread(target=self._admit, args=(unproven,), name="fabricx-store", daemon=True).start()
        except RuntimeError:  # out of threads
            with self._lock:
                self._unproven.remove(unproven)
            peer.close()
            self._pause(time.monotonic() + _AGAIN_S)

    def _make_place(self) -> bool:
        """Return whether a further connection can be accepted; otherwise accept none until a place is free.

        Ranks of a large launch connect at the same time, and prove the key soon: none of them may be closed. Programs
        without the key keep their connections for at most `PROOF_S` if others wait.
        """
        with self._lock:
            if len(self._unproven) < UNPROVEN:
                return True
            oldest, accepted = self._unproven[0]
            if time.monotonic() < accepted + PROOF_S:
                self._pause(accepted + PROOF_S)
                return False
            self._unproven.popleft()
        with contextlib.suppress(OSError):  # it has ended
            oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _pause(self, until: float) -> None:
        self._selector.unregister(self._listener)
        self._pause_ends = until

    def _admit(self, unproven: tuple[socket.socket, float]) -> None:
        """Authenticate a connection, in a separate thread: the process may answer late."""
        channel = authentication.admit(unproven[0], self._key)
        with self._lock:
            with contextlib.suppress(ValueError):
                self._unproven.remove(unproven)
            if channel is not None and self._closed:
                end(channel)
            elif channel is not None:
                self._admitted.append(channel)
            self._wake()

    def _add(self, channel: Channel) -> None:
        try:
            peer = Peer(channel)
            self._selector.register(peer.number, selectors.EVENT_READ)
            self._peers[peer.number] = peer
        except OSError:
            end(channel)

    def _attend(self, peer: Peer, events: int) -> None:
        """Read requests of a process and answer them, or send more of an answer."""
        try:
            if events & selectors.EVENT_WRITE:
                peer.send()
            if events & selectors.EVENT_READ:
                peer.receive()
            while peer.wait is None and (message := peer.message()) is not None:
                if (answer := self._state.request(peer, message)) is not None:
                    peer.answer(answer)
        except Exception:  # the process has ended, or a message was altered or malformed: others are still served
            self._drop(peer)
        else:
            self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.sending else 0)
        if self._selector.get_key(peer.number).events != events:
            self._selector.modify(peer.number, events)

    def _drop(self, peer: Peer) -> None:
        """Close a connection; its request is not answered."""
        self._selector.unregister(peer.number)
        del self._peers[peer.number]
        end(peer.channel)
        self._state.ended(peer)

    def _settle(self) -> None:
        """Answer the requests that are met now, or that have timed out."""
        for caller, data in self._state.answers(len(self._peers)):
            peer = cast(Peer, caller)
            try:
                peer.answer(data)
            except OSError:
                self._drop(peer)
            else:
                self._attend(peer, 0)  # requests that it has sent meanwhile
