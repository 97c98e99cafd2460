"""Check that all ranks gather and reduce the submodules of a sharded module in the same order."""

from __future__ import annotations

from typing import Final

from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree

SLOTS: Final = 64  # number of keys in the store; ranks are never that many collectives apart


class CollectiveOrder:
    """Detects ranks that are about to communicate different submodules, which would mix the data or hang.

    The first rank at a collective writes its description to the run's store; the other ranks compare it with the
    collective that they are about to start. The check is one store request per collective, without waiting.

    Args:
        world: the ranks that run the collectives.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0  # collectives so far
        self._written = [""] * SLOTS  # per key, the description that the first rank wrote

    def note(self, description: str) -> None:
        """Compare the next collective with that of the other ranks.

        Args:
            description: collective and its submodule, as text.

        Raises:
            RanksDisagree: the first rank runs a different collective at this position.
        """
        world, slot = self._world, self._count % SLOTS
        assert world.store is not None
        key = world.key(f"order/{world.generation}/{slot}")
        written = world.store.compare_set(key, self._written[slot], f"{self._count} {world.rank} {description}")
        self._written[slot] = written.decode()
        number, rank, other = self._written[slot].split(" ", 2)
        if (number, other) != (str(self._count), description):
            raise RanksDisagree(_explain({world.rank: description, int(rank): other}))
        self._count += 1


def _explain(by_rank: dict[int, str]) -> str:
    return (
        "ranks call different submodules, or in another order, and strategy=fsdp gathers the weights of a submodule on "
        "all ranks together: "
        + ", ".join(f"rank {rank} {what}" for rank, what in sorted(by_rank.items()))
        + ". Call the same submodules in the same order on all ranks (on an empty batch, or with a loss of zero "
        "weight), or use strategy=ddp"
    )
