"""Microbatches without a gradient on this rank: the ranks publish their reasons, and compare them before the update."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from fabricx.distributed.membership.generations import membership
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabricx.core.state import RunState
    from fabricx.distributed.world import World

NO_BATCH: Final = "has no batch"
NO_LOSS: Final = "returned no loss"
ALL_SKIP_S: Final = 120.0  # longest wait until all ranks have published that they skip a batch without a collective


class Absences:
    """Microbatches of an accumulation window without a gradient on this rank.

    Args:
        state: position of the run.

    Attributes:
        published: key in the store, reason, and part of the window's samples, of each microbatch.
        together: all ranks have reached the last backward of this rank.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.published: list[tuple[str, str, float]] = []
        self.together = True

    def publish(self, world: World, why: str, portion: float, position: tuple[int, int]) -> None:
        """Publish to the other ranks that this rank has no gradient of a microbatch; called before its backward.

        Args:
            world: ranks that step together.
            why: `NO_BATCH` or `NO_LOSS`.
            portion: part of the window's samples.
            position: index of the microbatch in its epoch, and its number in the window.
        """
        assert world.store is not None
        place = (world.generation, self._state.epoch, self._state.step, *position)
        key = world.key("nothing/" + "/".join(map(str, place)))
        world.store.set(f"{key}/{world.rank}", why)
        self.published.append((key, why, portion))

    def compared(self, world: World) -> Iterator[tuple[bool, float]]:
        """Compare the published microbatches with those of the other ranks, after the last backward of the window.

        Args:
            world: ranks that step together.

        Yields:
            whether all ranks skip the microbatch because none has a loss; and its part of the window's samples.

        Raises:
            RanksDisagree: only some ranks have a loss.
        """
        return (self._all_skip(world, *published) for published in self.published)

    def _all_skip(self, world: World, key: str, why: str, portion: float) -> tuple[bool, float]:
        store = world.store
        assert store is not None
        keys = [f"{key}/{rank}" for rank in range(world.size)]
        if not self.together:
            deadline = time.monotonic() + ALL_SKIP_S  # later, another rank must have trained the batch
            while not store.check(keys) and time.monotonic() < deadline:
                membership().check(world.generation)  # `store.wait` would not detect the death of a rank
                time.sleep(0.002)
        if store.check(keys):  # all ranks skip it, or it is an empty part of the global batch on all ranks
            return any(store.get(reason_key).decode() == NO_LOSS for reason_key in keys), portion
        if why != NO_BATCH:
            absent = [member for rank, member in enumerate(world.members) if store.check([keys[rank]])]
            raise RanksDisagree(
                f"step {self._state.step}: training_step returned None on rank {', '.join(map(str, absent))} and a "
                "loss on the other ranks; return None on all ranks to skip a batch"
            )
        return False, portion  # other ranks had a batch
