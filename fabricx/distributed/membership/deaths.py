"""Ends of workers, which the store of a run records in order, so that a rank reads each of them once.

The supervisor records a worker that ended without a result. Where a launcher has started the processes, the server of
the store records each process that ends (`PrivateStore.push_at_end`).
"""

from __future__ import annotations

from typing import Final, final

from fabricx.distributed.store.client import PrivateStore

DEATHS: Final = "gone"  # sequence in the store: worker numbers


@final
class Deaths:
    """The recorded ends.

    Args:
        store: the run's store.
    """

    def __init__(self, store: PrivateStore) -> None:
        self._store = store
        self._workers: list[int] = []

    @property
    def condition(self) -> dict[str, int]:
        """Return a condition for `PrivateStore.reach` that the next end meets."""
        return {f"{DEATHS}/{len(self._workers)}": 0}

    def read(self) -> set[int]:
        """Return the workers that have ended, by number."""
        while self._store.check([*self.condition]):
            self._workers.append(int(self._store.get(*self.condition)))
        return set(self._workers)
