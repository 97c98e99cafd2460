"""Server of a run's key-value store, for processes with the run's key only; does not import torch."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final, final

from fabricx.distributed import authentication
from fabricx.distributed.store_connections import Channel, Peer, Wait, end, pack, reached, shut, unpack

SOCKET: Final = "store"  # name of the Unix socket in the run's folder
UNPROVEN: Final = 512  # maximum connections before authentication; a further connection closes the oldest
BACKLOG: Final = 1024  # connections that wait to be accepted, as when all ranks of a launch start together
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
        requests: number of requests that were served.
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
        self.requests = 0
        self._values: dict[str, bytes] = {}
        self._lengths: dict[str, int] = {}  # of sequences
        self._lock = threading.RLock()  # reentrant: a signal handler may set a value
        self._closed = False
        self._changed: deque[str] = deque()  # keys that were set, for the requests that wait for them
        self._admitted: deque[Channel] = deque()
        self._unproven: deque[socket.socket] = deque()
        self._pause_ends: float | None = None  # when connections are accepted again
        self._peers: dict[int, Peer] = {}  # by file descriptor
        # Requests that wait for a key, oldest first, by the least number that they wait for; None for any value.
        self._waits: dict[str, dict[int | None, dict[Wait, None]]] = {}
        self._deadlines: list[tuple[float, int, Wait]] = []
        self._count = itertools.count()
        self._woken, self._wakes = os.pipe()
        for number in (self._woken, self._wakes):
            os.set_blocking(number, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fabricx-store", daemon=True)
        self._thread.start()

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
        self._store(key, value)
        self._wake()

    def push(self, name: str, value: bytes) -> None:
        """Append a value to a sequence, in the process that hosts the store.

        Args:
            name: name of the sequence; see `PrivateStore.push_at_end`.
            value: any bytes.
        """
        self._push(name, value)
        self._wake()

    def get(self, key: str) -> bytes | None:
        """Return a value, in the process that hosts the store; None if the key does not exist.

        Args:
            key: key of the value.
        """
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Return whether a key exists.

        Args:
            key: any key.
        """
        return key in self._values

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed = True
            for peer in self._unproven:
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
                if self._pause_ends is not None and time.monotonic() >= self._pause_ends:
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
        deadlines = [self._deadlines[0][0]] if self._deadlines else []
        if self._pause_ends is not None:
            deadlines.append(self._pause_ends)
        return min(LONGEST_S, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
            peer.setblocking(True)
            with self._lock:
                self._unproven.append(peer)
                if len(self._unproven) > UNPROVEN:
                    with contextlib.suppress(OSError):  # it has ended
                        self._unproven.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._admit, args=(peer,), name="fabricx-store", daemon=True).start()
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except (OSError, RuntimeError):  # out of file descriptors or threads: serve the open connections meanwhile
            self._selector.unregister(self._listener)
            self._pause_ends = time.monotonic() + _AGAIN_S

    def _admit(self, peer: socket.socket) -> None:
        """Authenticate a connection, in a separate thread: the process may answer late."""
        channel = authentication.admit(peer, self._key)
        with self._lock:
            with contextlib.suppress(ValueError):
                self._unproven.remove(peer)
            if channel is None:
                return
            if self._closed:
                end(channel)
                return
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
                self.requests += 1
                operation, *arguments = unpack(message)
                answer = getattr(self, f"_do_{operation.decode()}")(peer, *arguments)
                if answer is not None:
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
        if peer.wait is not None:
            self._forget(peer.wait)
        end(peer.channel)
        if peer.at_end is not None:
            self._push(*peer.at_end)

    def _settle(self) -> None:
        """Answer the requests that are met now, or that have timed out."""
        now = time.monotonic()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].pending):
            wait = heapq.heappop(self._deadlines)[2]
            if wait.pending:
                self._answer(wait, [])
        if len(self._deadlines) > 2 * len(self._peers) + 64:  # most of these requests have been answered
            self._deadlines = [entry for entry in self._deadlines if entry[2].pending]
            heapq.heapify(self._deadlines)
        while self._changed:
            keys: dict[str, None] = {}
            while self._changed:
                keys[self._changed.popleft()] = None
            for key in keys:
                self._answer_waits_for(key)

    def _answer_waits_for(self, key: str) -> None:
        for least, waits in tuple(self._waits.get(key, {}).items()):
            if least is not None and not reached(self._values.get(key), least):
                continue
            for wait in tuple(waits):
                if wait.pending and wait.may_be_met(key) and (existing := wait.found(self._values)):
                    self._answer(wait, existing)

    def _answer(self, wait: Wait, existing: Iterable[str]) -> None:
        """Answer a request that waits, with keys and their values."""
        self._forget(wait)
        try:
            wait.peer.answer(self._packed(existing))
        except OSError:
            self._drop(wait.peer)
        else:
            self._attend(wait.peer, 0)  # requests that it has sent meanwhile

    def _packed(self, keys: Iterable[str]) -> bytes:
        return pack(*itertools.chain(*((key.encode(), self._values[key]) for key in keys)))

    def _forget(self, wait: Wait) -> None:
        wait.peer.wait = None
        for key, least in wait.keys.items():
            if (waits := self._waits.get(key)) is not None:
                waits[least].pop(wait, None)
                if not waits[least]:
                    del waits[least]
                if not waits:
                    del self._waits[key]

    def _store(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            self._changed.append(key)

    def _push(self, name: str, value: bytes) -> None:
        """Append a value to a sequence, the values of which are never deleted."""
        with self._lock:
            number = self._lengths.get(name, 0)
            self._lengths[name] = number + 1
            self._store(f"{name}/{number}", value)

    # -- operations ---------------------------------------------------------------------------------------------

    def _do_set(self, peer: Peer, key: bytes, value: bytes) -> bytes:
        self._store(key.decode(), value)
        return b""

    def _do_wait(self, peer: Peer, seconds: bytes, every: bytes, *keys: bytes) -> bytes | None:
        """Answer when all or any of the keys exist, with these keys and their values; empty at the timeout."""
        return self._wait(Wait(peer, dict.fromkeys(key.decode() for key in keys), every=bool(every)), float(seconds))

    def _do_reach(self, peer: Peer, seconds: bytes, *conditions: bytes) -> bytes | None:
        """Answer when any of several numbers is large enough; the answer is that of `_do_wait`."""
        numbers: dict[str, int | None] = {
            key.decode(): int(least) for key, least in zip(conditions[::2], conditions[1::2], strict=True)
        }
        return self._wait(Wait(peer, numbers, every=False), float(seconds))

    def _wait(self, wait: Wait, seconds: float) -> bytes | None:
        """Return the answer; None if the request waits."""
        if not math.isfinite(seconds):
            raise ValueError("the time of a request is not a number")
        if existing := wait.found(self._values):
            return self._packed(existing)
        wait.peer.wait = wait
        for key, least in wait.keys.items():
            self._waits.setdefault(key, {}).setdefault(least, {})[wait] = None
        heapq.heappush(self._deadlines, (time.monotonic() + seconds, next(self._count), wait))
        return None

    def _do_raise_to(self, peer: Peer, key: bytes, least: bytes) -> bytes:
        with self._lock:
            name = key.decode()
            if name not in self._values or int(self._values[name]) < int(least):
                self._store(name, least)
        return b""

    def _do_add(self, peer: Peer, key: bytes, amount: bytes) -> bytes:
        with self._lock:
            value = str(int(self._values.get(key.decode(), b"0")) + int(amount)).encode()
            self._store(key.decode(), value)
            return value

    def _do_compare_set(self, peer: Peer, key: bytes, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            current = self._values.get(key.decode())
            if current == expected or (current is None and not expected):
                self._store(key.decode(), desired)
                return desired
            return expected if current is None else current

    def _do_delete_key(self, peer: Peer, *keys: bytes) -> bytes:
        with self._lock:
            return b"" if None in [self._values.pop(key.decode(), None) for key in keys] else b"1"

    def _do_push_at_end(self, peer: Peer, name: bytes, value: bytes) -> bytes:
        peer.at_end = name.decode(), value
        return b""

    def _do_check(self, peer: Peer, *keys: bytes) -> bytes:
        return b"1" if all(key.decode() in self._values for key in keys) else b""
