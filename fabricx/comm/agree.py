"""Ranks agree to do something at the same boundary, such as to stop, without a collective on the steps before."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import final

from torch.distributed import Store

from fabricx.comm.authentication import AuthenticationError
from fabricx.comm.generations import membership
from fabricx.comm.world import World

POLL_S = 0.05  # how often a rank looks whether somebody asks
ANSWER_S = 0.005  # how often it tells where it is, once somebody does
EVERYBODY = "stop/requested"  # set by the supervisor: not of one run, of all


@final
class Agreement:
    """Asks all ranks to do something, and finds the boundary at which all of them can.

    Ranks pass the same boundaries in the same order, though not at the same moment. One that has been asked says
    at each boundary that it wants to, and waits there until all ranks want to at that very one (then all do), or one of
    them turns out to have passed it (then it goes on to the next one, at which that rank will want to as well).
    Ranks that are all asked at the same boundary stop exactly there. A thread of each rank looks for requests and says
    which boundary its rank has passed; as long as nobody asks, a boundary costs two attribute accesses.

    Args:
        world: all ranks.
        name: of what is agreed upon; "stop" is asked for by the supervisor, too.
    """

    def __init__(self, world: World, name: str = "stop") -> None:
        self.reason: str | None = None
        self._world, self._name = world, name
        self._passed = 0
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        if world.size > 1:
            assert world.store is not None
            self._store = world.store
            self._watcher = threading.Thread(target=self._watch, name=f"fabricx-{name}", daemon=True)
            self._watcher.start()

    def request(self, reason: str) -> None:
        """Ask all ranks; from any thread, also from a signal handler."""
        if self.reason is None:
            self.reason = reason
        if self._watcher is not None:
            self._store.set(self._key("requested"), reason)

    def at_boundary(self, index: int) -> bool:
        """Return whether all ranks do it here; `index` grows by one from boundary to boundary."""
        if self.reason is None:
            self._passed = index
            return False
        if self._watcher is None:
            return True
        self._store.add(self._key(f"want/{index}"), 1)
        others = [self._key(f"passed/{rank}") for rank in range(self._world.size) if rank != self._world.rank]
        while self._store.add(self._key(f"want/{index}"), 0) < self._world.size:
            if any(self._store.check([key]) and int(self._store.get(key)) >= index for key in others):
                self._passed = index
                return False
            membership().check(self._world.generation)
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _key(self, name: str) -> str:
        return self._world.key(f"{self._name}/{self._world.generation}/{name}")

    def _watch(self) -> None:
        store = self._store
        told = -1
        keys = [self._key("requested"), *([EVERYBODY] if self._name == "stop" else [])]
        try:
            while not self._closed.wait(POLL_S if self.reason is None else ANSWER_S):
                if self.reason is None:
                    self._look(store, keys)
                elif self._passed != told:
                    told = self._passed
                    store.set(self._key(f"passed/{self._world.rank}"), str(told))
        except Exception:
            return  # the store is gone, and with it everybody who could ask

    def _look(self, store: Store, keys: list[str]) -> None:
        """Take over a request of another process."""
        found = _requested(store, keys)
        if found is not None:  # else this rank's own request, made while the store was asked, would be lost
            self.reason = found


def _requested(store: Store, keys: list[str]) -> str | None:
    """Return the reason of a request, if there is one that a process of the run has signed."""
    for key in keys:
        with contextlib.suppress(AuthenticationError):
            if store.check([key]):
                return store.get(key).decode()
    return None
