"""Counts of messages between all ranks of a group outside of torch's collectives, for the report of a hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from fabricx.distributed.activity.collective_trace import GroupTrace


@final
class MessageCounts:
    """Counts of messages that each rank of a group sends to all others without a collective of torch.

    Args:
        name: name of the group, unique in the run and equal on its ranks.
        ranks: ranks of the run.
        kind: kind of the messages, such as "gradients".

    Attributes:
        sent: number of messages that this rank has sent.
        awaited: number of the messages that the main thread waits for, counted from 1; 0 if it waits for none.
    """

    def __init__(self, name: str, ranks: Sequence[int], kind: str) -> None:
        self._name, self._ranks, self._kind = name, tuple(ranks), kind
        self.sent = self.awaited = 0
        _COUNTED[name] = self

    def trace(self) -> GroupTrace:
        """Return the messages as a collective, which is complete when each rank has sent its own."""
        return GroupTrace(
            self._ranks, self._name, {self.sent: self._kind}, (self.awaited,) if self.awaited else ()
        )  # fmt: skip

    def close(self) -> None:
        """Forget the group."""
        _COUNTED.pop(self._name, None)


_COUNTED: Final[dict[str, MessageCounts]] = {}


def traces() -> tuple[GroupTrace, ...]:
    """Return the messages of each group that is open."""
    return tuple(counts.trace() for counts in list(_COUNTED.values()))


def forget() -> None:
    """Forget the groups: this process has joined a new group."""
    _COUNTED.clear()
