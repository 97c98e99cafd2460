"""The end of a run: a rank leaves when all ranks have finished their last collective."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from fabricx.distributed.generations import ANY_DEATH, death_key, membership
from fabricx.distributed.world import World

LIMIT_S: Final = 60.0  # all ranks have run the same collectives: they differ by moments, and by users' hooks
LOOK_S: Final = 0.1  # interval at which a rank that waits for the departure checks whether ranks have died


def await_departure(world: World, timeout_s: float = LIMIT_S) -> None:
    """Wait until all ranks have finished their last collective; each rank calls it after its own last collective.

    A rank that exits closes its connections, and data that another rank has not yet read from them can be lost (a
    connection reset drops received data). Therefore each rank reports in the store, which no rank hosts, and exits
    when all ranks have reported. If a rank dies meanwhile, a supervisor or the server of a launch's store reports
    it; else the timeout ends the wait.

    Args:
        world: all ranks.
        timeout_s: maximum time to wait, in seconds.
    """
    if world.size == 1 or world.store is None:
        return
    member, name = membership(), f"departure/{world.generation}"
    store, deadline = world.store, time.monotonic() + timeout_s
    remaining = dict(enumerate(member.members(world.generation, world.size)))
    with contextlib.suppress(OSError, dist.DistError):  # the store's host has exited: no rank can report any more
        store.set(world.key(f"{name}/{world.rank}"), "done")
        if store.add(world.key(f"{name}/count"), 1) == world.size:
            store.set(world.key(f"{name}/all"), "")
        while not member.outdated(world.generation) and (left := deadline - time.monotonic()) > 0:
            if _exists(store, [world.key(f"{name}/all")], min(left, LOOK_S)):
                return
            if store.check([ANY_DEATH]):
                break
        while remaining and time.monotonic() < deadline and not member.outdated(world.generation):
            for rank, worker in list(remaining.items()):
                if store.check([world.key(f"{name}/{rank}")]) or store.check([death_key(worker)]):
                    del remaining[rank]
            time.sleep(LOOK_S if remaining else 0.0)


def _exists(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Return whether keys exist, after a wait for them."""
    with contextlib.suppress(dist.DistStoreError):
        store.wait(keys, timedelta(seconds=seconds))
        return True
    return False
