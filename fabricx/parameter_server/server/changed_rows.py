"""Tracks changed rows of sparse tables, so that meetings transfer only these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

BEGUN: Final = "begun"  # of the tables that all workers began with


@final
class ChangedRows:
    """The update that has changed each row last.

    Args:
        heights: rows of each table.
        version: updates until now; what was changed before isn't known.
        life: names tables that go on without a break.

    >>> rows = ChangedRows([4], 7, "a")
    >>> rows.note(0, torch.tensor([2, 3]), 8)
    >>> rows.since(0, 7), rows.known(("a", 7)), rows.known(("b", 7)), rows.known(None)
    (tensor([2, 3]), True, False, False)
    """

    def __init__(self, heights: Sequence[int], version: int, life: str) -> None:
        self.life = life
        self._begun = version
        self._newest = [torch.full((height,), version, dtype=torch.int64) for height in heights]

    def note(self, table: int, rows: Tensor, version: int) -> None:
        """Note that an update has changed rows, by number."""
        self._newest[table][rows.long()] = version

    def known(self, had: tuple[str, int] | None) -> bool:
        """Return whether it is known what has changed since a worker had whole tables: (life, version)."""
        return had is not None and had[0] == self.life and had[1] >= self._begun

    def since(self, table: int, version: int) -> Tensor:
        """Return the numbers of the rows that have changed since a version, in ascending order."""
        return (self._newest[table] > version).nonzero().view(-1)
