"""Records which rows of sparse tables have changed, so that a server sends a worker only these rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class ChangedRows:
    """The number of the latest update of each row.

    Args:
        heights: number of rows of each table.
        version: number of updates when the record begins; changes by earlier updates are not recorded.
        history: name of the sequence of updates; a version of another sequence may have other rows.

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
            rows: indices of the rows, shape [changed rows].
            version: number of the update.
        """
        self._newest[table][rows.long()] = version

    def known(self, had: tuple[str, int] | None) -> bool:
        """Return whether the record has all changes since a worker received complete tables.

        Args:
            had: (history, version) of these tables; None if the worker has not received any.
        """
        return had is not None and had[0] == self.history and had[1] >= self._begun

    def since(self, table: int, version: int) -> Tensor:
        """Return the indices of the rows that have changed since a version, in ascending order.

        Args:
            table: number of the table.
            version: version of the worker's table.
        """
        return (self._newest[table] > version).nonzero().view(-1)
