"""Ranks agree on an action at one step boundary, such as a stop, without a collective on the steps before."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import final

from torch.distributed import Store

from fabricx.distributed.authentication import AuthenticationError
from fabricx.distributed.generations import membership
from fabricx.distributed.world import World

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
        beside: an agreement upon something else of the same world, whose thread looks after this one, too.
    """

    def __init__(self, world: World, name: str = "stop", beside: Agreement | None = None) -> None:
        self.reason: str | None = None
        self._world, self._name = world, name
        self._passed = self._told = -1
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
        """Look no more after an agreement that was made beside this one."""
        if other in self._watched:
            self._watched.remove(other)

    def request(self, reason: str) -> None:
        """Ask all ranks; from any thread, also from a signal handler."""
        if self.reason is None:
            self.reason = reason
        if self._watcher is not None:
            self._store.set(self._key("requested"), reason)

    def at_boundary(self, index: int) -> bool:
        """Return whether all ranks do it here; `index` grows by one from boundary to boundary."""
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
            membership().check(self._world.generation)
            time.sleep(0.002)
        return True

    def pass_by(self, index: int) -> None:
        """Go on from a boundary without having asked there."""
        self._passed = index

    def passed_by(self, rank: int) -> int:
        """Return the newest boundary that a rank is known to have passed since somebody has asked; -1 for none."""
        key = self._key(f"passed/{rank}")
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def keys_of_mine(self) -> list[str]:
        """Return the keys of the store that this rank has to delete."""
        return [self._key(f"passed/{self._world.rank}"), *([self._key("requested")] if self._world.main_rank else [])]

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _key(self, name: str) -> str:
        return self._world.key(f"{self._name}/{self._world.generation}/{name}")

    def _watch(self) -> None:
        try:
            while not self._closed.wait(POLL_S if all(one.reason is None for one in self._watched) else ANSWER_S):
                for one in tuple(self._watched):
                    one._look_and_answer()
        except Exception:
            return  # the store is gone, and with it everybody who could ask

    def _look_and_answer(self) -> None:
        if self.reason is None and self._name == "stop":
            self._look(self._store, [self._key("requested"), EVERYBODY])
        elif self.reason is None:  # asked for no reason: the key may be deleted meanwhile, and that would be waited for
            self.reason = self._name if self._store.check([self._key("requested")]) else self.reason
        elif self._passed != self._told:
            self._told = self._passed
            self._store.set(self._key(f"passed/{self._world.rank}"), str(self._told))

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
