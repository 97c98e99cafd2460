"""Agree on one step boundary for an action of all ranks, such as a stop, without a collective on earlier steps."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import final

from torch.distributed import Store

from fabricx.distributed.authentication import AuthenticationError
from fabricx.distributed.generations import death_key, membership
from fabricx.distributed.world import World
from fabricx.errors import PeerLost

POLL_S = 0.05  # interval at which a rank checks for requests
ANSWER_S = 0.005  # interval at which it publishes its position while a request is open
STOP_KEY = "stop/requested"  # set by the supervisor; applies to all runs


@final
class Agreement:
    """Requests an action on all ranks, and determines the boundary at which all ranks can perform it.

    Ranks pass the same boundaries in the same order, though not at the same time. A rank with a request publishes at
    each boundary that it wants to act, and waits until all ranks want to act at this boundary (then all do) or until a
    rank turns out to have passed it (then it continues to the next boundary, where that rank will want to act as well).
    Ranks that receive the request at the same boundary stop exactly at that boundary. A thread of each rank polls for
    requests and publishes the boundary that its rank has passed; without a request, a boundary costs two attribute
    accesses.

    Args:
        world: all ranks.
        name: name of the action; for "stop" the supervisor's request counts, too.
        beside: agreement on another action of the same world, whose thread also serves this agreement.

    Attributes:
        reason: reason of the request; None without a request.
    """

    def __init__(self, world: World, name: str = "stop", beside: Agreement | None = None) -> None:
        self.reason: str | None = None
        self._world, self._name = world, name
        self._passed = self._published = -1
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._watched: list[Agreement] = [self]
        if world.size > 1:
            assert world.store is not None
            self._store = world.store
            if beside is not None:
                self._watcher = beside._watcher
                beside._watched.append(self)
                return
            self._watcher = threading.Thread(target=self._watch, name=f"fabricx-{name}", daemon=True)
            self._watcher.start()

    def forget(self, other: Agreement) -> None:
        """Stop to serve an agreement that shares this agreement's thread.

        Args:
            other: created with `beside=self`.
        """
        if other in self._watched:
            self._watched.remove(other)

    def request(self, reason: str) -> None:
        """Request the action on all ranks; may be called from any thread or signal handler.

        Args:
            reason: text for all ranks; the first request counts.
        """
        if self.reason is None:
            self.reason = reason
        if self._watcher is not None:
            self._store.set(self._key("requested"), reason)

    def at_boundary(self, index: int) -> bool:
        """Return whether all ranks perform the action at this boundary.

        Args:
            index: number of the boundary; increases by 1 from boundary to boundary.
        """
        if self.reason is None:
            self.pass_by(index)
            return False
        if self._watcher is None:
            return True
        self._store.add(self._key(f"want/{index}"), 1)
        others = [self._key(f"passed/{rank}") for rank in range(self._world.size) if rank != self._world.rank]
        while self._store.add(self._key(f"want/{index}"), 0) < self._world.size:
            if any(self._store.check([key]) and int(self._store.get(key)) >= index for key in others):
                self._passed = index
                return False
            self._check_peers()
            time.sleep(0.002)
        return True

    def _check_peers(self) -> None:
        """Raise an error if a rank has ended, which will never reach this boundary."""
        member, world = membership(), self._world
        member.check(world.generation)
        if not member.changes:  # no supervisor ends the generation
            for rank, worker in enumerate(member.members(world.generation, world.size)):
                if self._store.check([death_key(worker)]):
                    raise PeerLost(f"rank {rank} has ended before all ranks agreed on the request {self._name!r}")

    def pass_by(self, index: int) -> None:
        """Record that this rank has passed a boundary without a request.

        Args:
            index: number of the boundary.
        """
        self._passed = index

    def passed_by(self, rank: int) -> int:
        """Return the newest boundary that a rank has published since a request; -1 for none.

        Args:
            rank: any other rank.
        """
        key = self._key(f"passed/{rank}")
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def local_keys(self) -> list[str]:
        """Return the store keys that this rank has to delete."""
        return [self._key(f"passed/{self._world.rank}"), *([self._key("requested")] if self._world.main_rank else [])]

    def close(self) -> None:
        """Stop the polling thread."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _key(self, name: str) -> str:
        return self._world.key(f"{self._name}/{self._world.generation}/{name}")

    def _watch(self) -> None:
        try:
            while not self._closed.wait(POLL_S if all(a.reason is None for a in self._watched) else ANSWER_S):
                for agreement in tuple(self._watched):
                    agreement._poll()
        except Exception:
            return  # the store has closed, and all processes that could send a request have ended

    def _poll(self) -> None:
        if self.reason is None and self._name == "stop":
            self._read_request(self._store, [self._key("requested"), STOP_KEY])
        elif self.reason is None:  # check only: the key may be deleted meanwhile, and `get` would wait for it
            self.reason = self._name if self._store.check([self._key("requested")]) else self.reason
        elif self._passed != self._published:
            self._published = self._passed
            self._store.set(self._key(f"passed/{self._world.rank}"), str(self._published))

    def _read_request(self, store: Store, keys: list[str]) -> None:
        """Read the request of another process."""
        reason = _requested(store, keys)
        if reason is not None:  # do not overwrite a request that this rank has made during the store access
            self.reason = reason


def _requested(store: Store, keys: list[str]) -> str | None:
    """Return the reason of a request that a process of the run has signed; None without such a request."""
    for key in keys:
        with contextlib.suppress(AuthenticationError):
            if store.check([key]):
                return store.get(key).decode()
    return None
