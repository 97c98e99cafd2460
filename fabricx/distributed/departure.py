"""The end of a run: a rank exits when all ranks have finished their last collective."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import torch.distributed as dist

from fabricx.distributed.membership.deaths import Deaths
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World

LIMIT_S: Final = 60.0  # all ranks have run the same collectives: they differ by moments, and by users' hooks
LOOK_S: Final = 0.1  # interval at which a rank that waits checks whether the supervisor has ended the generation
LONG_S: Final = 10.0  # longest wait without a supervisor, after which the wait is repeated


def await_departure(world: World, timeout_s: float = LIMIT_S) -> None:
    """Wait until all ranks have finished their last collective; each rank calls it after its own last collective.

    A rank that exits closes its connections, and data that a peer has not yet read from them can be lost (a
    connection reset drops received data). Therefore each rank reports in the store, which no rank hosts, and exits
    when all ranks have reported. If a rank dies meanwhile, a supervisor or the server of a launch's store reports
    it; else the timeout ends the wait.

    Args:
        world: all ranks.
        timeout_s: maximum time to wait, in seconds.
    """
    if world.size == 1 or world.store is None:
        return
    assert isinstance(world.store, PrivateStore)
    store, member, name = world.store, membership(), world.key(f"departure/{world.generation}")
    deadline, look_s = time.monotonic() + timeout_s, LOOK_S if member.changes else LONG_S
    deaths, members, dead = Deaths(store), member.members(world.generation, world.size), set[int]()
    with contextlib.suppress(OSError, dist.DistError):  # the store's host has exited: no rank can report any more
        store.set(f"{name}/{world.rank}", "done")
        store.add(f"{name}/count", 1)
        while not member.is_broken(world.generation) and (left := deadline - time.monotonic()) > 0:
            condition = {f"{name}/count": world.size, **deaths.condition}
            if f"{name}/count" in store.reach(condition, min(left, LOOK_S if dead else look_s)):
                return
            dead = {worker for worker in deaths.read() if worker in members}
            # A rank may have died between its two requests, so the count doesn't tell how many others have reported.
            living = [f"{name}/{rank}" for rank, worker in enumerate(members) if worker not in dead]
            if dead and store.check(living):
                return
