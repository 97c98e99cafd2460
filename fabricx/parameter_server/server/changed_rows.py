"""Tracks the changed rows of sparse tables, so that only these are sent when workers meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class ChangedRows:
    """Records, for each row, the update that has changed it last.

    Args:
        heights: number of rows of each table.
        version: present number of updates; earlier changes are unknown.
        history: identifies an uninterrupted history of the tables.

    >>> rows = ChangedRows([4], 7, "a")
    >>> rows.note(0, torch.tensor([2, 3]), 8)
    >>> rows.since(0, 7), rows.known(("a", 7)), rows.known(("b", 7)), rows.known(None)
    (tensor([2, 3]), True, False, False)
    """

    def __init__(self, heights: Sequence[int], version: int, history: str) -> None:
        self.history = history
        self._begun = version
        self._newest = [torch.full((height,), version, dtype=torch.int64) for height in heights]

    def note(self, table: int, rows: Tensor, version: int) -> None:
        """Record that an update has changed rows.

        Args:
            table: number of the table.
            rows: ids of the rows.
            version: number of the update.
        """
        self._newest[table][rows.long()] = version

    def known(self, had: tuple[str, int] | None) -> bool:
        """Return whether all changes since a worker received complete tables are recorded.

        Args:
            had: (history, version) of the worker's tables; None if it has no tables.
        """
        return had is not None and had[0] == self.history and had[1] >= self._begun

    def since(self, table: int, version: int) -> Tensor:
        """Return the ids of the rows that have changed since a version, in ascending order.

        Args:
            table: number of the table.
            version: version of the worker's table.
        """
        return (self._newest[table] > version).nonzero().view(-1)
