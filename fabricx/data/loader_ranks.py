"""The rank of this process in the loader processes of a stream, which divides its data by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, final

from torch.utils.data import DataLoader

from fabricx.distributed import world as worlds
from fabricx.distributed.membership.process_groups import set_loader_rank


def give_rank(source: Any) -> None:
    """Let loader processes of a stream find the rank as in the process that reads the stream.

    Args:
        source: a DataLoader; nothing changes for other iterables.
    """
    processes = isinstance(source, DataLoader) and source.num_workers
    if processes and not isinstance(source.worker_init_fn, _GivesRank):
        source.worker_init_fn = _GivesRank(source.worker_init_fn)


@final
class _GivesRank:
    """`worker_init_fn` after which environment variables and `torch.distributed` have the rank.

    Forks of a rank have both; a process of a fork server has no process group.

    Args:
        first: the user's `worker_init_fn`, called with the number of the loader process; None for none.
    """

    def __init__(self, first: Callable[[int], Any] | None) -> None:
        self._first = first
        self._rank: tuple[int, int] | None = None
        self._variables: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        world = worlds.current()
        if world is None:
            return self.__dict__
        return {**self.__dict__, "_rank": (world.rank, world.size), "_variables": world.variables}

    def __call__(self, number: int) -> None:
        os.environ.update(self._variables)
        if self._rank is not None:
            set_loader_rank(*self._rank)
        if self._first is not None:
            self._first(number)
