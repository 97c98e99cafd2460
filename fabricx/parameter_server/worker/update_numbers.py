"""Numbers of updates on an asynchronous worker, and hyperparameters of earlier updates."""

from __future__ import annotations

from collections import deque
from typing import Final, final

from fabricx.parameter_server.wire.messages import Groups, Reply

EarlierGroups = list[tuple[int, Groups]]  # numbers of updates, and hyperparameters before these

EARLIER: Final = 256  # changes of hyperparameters that are kept for late gradients


@final
class UpdateNumbers:
    """Numbers of updates.

    A version counts global batches, and a number of an update counts updates: a global batch without a gradient
    increases the version only. Therefore number = version - skipped.

    Args:
        step: number of updates of the run so far.

    Attributes:
        version: newest version of the weights that this worker has received or made.
        skipped: versions without an update, because a global batch had no gradient.
        pulled: number of updates in this worker's weights.
        number: number of the update to which the gradient of the present lease belongs.
        newest: update of this worker's newest push; -1 before the first.

    >>> numbers = UpdateNumbers(5)
    >>> numbers.keep_earlier_groups(7, [[{"lr": 0.1}]])
    >>> [numbers.earlier_groups(update) for update in (6, 7)]
    [[[{'lr': 0.1}]], None]
    """

    def __init__(self, step: int) -> None:
        self.version = self.pulled = step
        self.skipped = self.number = 0
        self.newest = -1
        self._earlier: deque[tuple[int, Groups]] = deque(maxlen=EARLIER)  # (update, values before it), ascending

    def note(self, reply: Reply) -> None:
        """Record the version of pulled weights.

        Args:
            reply: reply of the first server.
        """
        self.version, self.skipped = reply.version, reply.skipped
        self.pulled = reply.version - reply.skipped

    def pushed(self, *, stepped: bool, used: bool) -> int:
        """Record the push of the present lease; returns the number of updates that include it.

        Args:
            stepped: the lease had a gradient.
            used: the servers use the gradient.
        """
        if stepped and used:
            self.newest = self.number
        updates = self.number + stepped
        self.version = updates + self.skipped
        return updates

    def keep_earlier_groups(self, update: int, before: Groups) -> None:
        """Save hyperparameters, before schedulers step.

        Args:
            update: number of the first update with new hyperparameters.
            before: hyperparameters of earlier updates.
        """
        self._earlier.append((update, before))

    def earlier_groups(self, update: int) -> Groups | None:
        """Return the hyperparameters of an update, if schedulers have stepped beyond it; else None.

        Args:
            update: number of the update.
        """
        if not self._earlier or update >= self._earlier[-1][0]:
            return None
        return next(groups for changed, groups in self._earlier if update < changed)

    def all_earlier_groups(self) -> EarlierGroups:
        """Return all saved hyperparameters, for `take_earlier_groups` of another worker."""
        return list(self._earlier)

    def take_earlier_groups(self, earlier: EarlierGroups) -> None:
        """Replace all saved hyperparameters by those of another worker.

        Args:
            earlier: result of `all_earlier_groups`.
        """
        self._earlier.clear()
        self._earlier.extend(earlier)
