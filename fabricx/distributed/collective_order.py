"""Compares the order in which ranks gather and reduce the parts of a sharded module."""

from __future__ import annotations

from typing import Final

from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree

SLOTS: Final = 64  # keys in the store; ranks are never that many collectives apart


class Collectives:
    """Finds ranks that are about to communicate different parts of a module, which would mix these, or hang.

    The rank that comes to a collective first writes what it is into the run's store, and the others compare that with
    what they are about to do. This is one request to the store for each collective. Nobody waits for another rank.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0  # collectives so far
        self._written = [""] * SLOTS  # what the first rank wrote

    def note(self, what: str) -> None:
        """Note what is about to be communicated.

        Raises:
            RanksDisagree: another rank communicates something else at this place.
        """
        world, slot = self._world, self._count % SLOTS
        assert world.store is not None
        key = world.key(f"order/{world.generation}/{slot}")
        written = world.store.compare_set(key, self._written[slot], f"{self._count} {world.rank} {what}")
        self._written[slot] = written.decode()
        number, rank, other = self._written[slot].split(" ", 2)
        if (number, other) != (str(self._count), what):
            raise RanksDisagree(_explain({world.rank: what, int(rank): other}))
        self._count += 1


def _explain(by_rank: dict[int, str]) -> str:
    return (
        "ranks call different submodules, or in another order, and strategy=fsdp gathers the weights of a submodule on "
        "all ranks together: "
        + ", ".join(f"rank {rank} {what}" for rank, what in sorted(by_rank.items()))
        + ". Call the same submodules in the same order on all ranks (on an empty batch, or with a loss of zero "
        "weight), or take strategy=ddp"
    )
