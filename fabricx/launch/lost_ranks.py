"""End of a rank that is blocked because another rank has died or its machine is unreachable, under torchrun.

The connections of a killed process end at once. If a machine loses its power or its network, its connections stay open:
gloo then waits for 30 minutes, and torchrun waits 30 s for a process that does not end. The store's connections detect
such a machine by TCP keep-alive, and the server of the store records its ranks as ended.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final, final

from torch.distributed import DistError

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.deaths import Deaths
from fabricx.distributed.membership.lost_operations import BlockedMainThread
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World
from fabricx.errors import PeerLost

CHECKS: Final = 2  # calls of `check` without progress of the main thread after which it is blocked
WATCH_S: Final = 3600.0  # longest wait for the end of a rank, after which the wait is repeated


@final
class LostRanks:
    """Ranks that have ended before they had left the run. A thread waits for them, without polling.

    Args:
        world: all ranks of the launch, with its store.
        blocked: detects that the main thread waits for other ranks without progress.
    """

    def __init__(self, world: World, blocked: BlockedMainThread | None = None) -> None:
        assert isinstance(world.store, PrivateStore)
        self._world, self._store = world, world.store
        self._blocked = blocked or BlockedMainThread(waits=heartbeat.awaits, checks=CHECKS)
        self._lost = ""
        self._closed = False
        self._store.delete_key(self._left(world.rank))  # set if this is a later run of this process
        self._watch = self._store.watch(soon=True)
        self._thread = threading.Thread(target=self._run, name="fabricx-lost-ranks", daemon=True)
        self._thread.start()

    def check(self) -> PeerLost | None:
        """Return an error if this rank waits in vain for a lost rank; call it once in a second."""
        if not self._lost or not self._blocked.found():
            return None
        return PeerLost(f"{self._lost}; torchrun starts the ranks again")

    def leave(self) -> None:
        """Record that this rank has finished, so that other ranks do not miss it."""
        with contextlib.suppress(DistError):
            self._store.set(self._left(self._world.rank), "")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._watch.interrupt()
        self._thread.join()

    def _left(self, rank: int) -> str:
        return self._world.key(f"left/{rank}")

    def _run(self) -> None:
        deaths = Deaths(self._store)
        with contextlib.closing(self._watch):
            try:
                while not (self._closed or self._lost):
                    if self._watch.wait_any([*deaths.condition], WATCH_S):
                        self._lost = self._ended(deaths.read())
            except DistError as error:  # the machine of the first rank hosts the store
                self._lost = f"rank 0 of this launch has ended, or its machine is unreachable: {error}"

    def _ended(self, numbers: set[int]) -> str:
        """Return a text for a process that has ended before it had left the run; "" without."""
        lost = [rank for rank in sorted(numbers) if not self._store.check([self._left(rank)])]
        return f"rank {lost[0]} has ended, or its machine is unreachable" if lost else ""
