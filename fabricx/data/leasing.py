"""Data that ranks lease part by part, each at its own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from fabricx.data.order import Share


class Dealer(Protocol):
    """Gives leases to the ranks; `fabricx.parameter_server` has one.

    Attributes:
        lease: what this rank is training.
        section: number of the newest one.
        planned: workers that the run began with.
        scheduled: updates that the schedules by steps have followed.
        dropped: the newest gradient came too late, and its data is dealt again.
        may_drop: that may happen.
        workers: numbers of those that train, by rank.
    """

    lease: Any
    section: int
    planned: int
    scheduled: int
    dropped: bool
    may_drop: bool
    workers: tuple[int, ...]

    def position(self) -> Any:
        """Return what a worker that comes later has to know, for its `take_position`."""

    def take_position(self, position: Any) -> None:
        """Be where another worker is."""

    @property
    def leases_per_update(self) -> int:
        """Return how many leases make an update."""
        ...

    def open(self, leases: int) -> None:
        """Begin a section of so many leases; every rank does."""

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return the leases that are missing in the weights, those trained twice, and the step counted from.

        All ranks are together, and all sections are over.
        """
        ...

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease; what it logs is taken by that function, and goes with its gradient."""

    def logged(self) -> dict[str, Any]:
        """Return the sums that all ranks have logged with gradients of the newest section which are in the weights.

        All ranks are together, and the section is over.
        """
        ...

    def ask(self, *, wait: bool) -> Any:
        """Return a lease; with `wait`, this rank holds none and wants one as soon as there is one."""


Section = Callable[[int, int | float], int]  # given the leases that are done and left, how many until the ranks meet


@final
class Deal:
    """One section: what this rank was given, and where in the order it lies.

    Args:
        dealer: who is asked.
        begin: the first place of the section.
        items: the end of the order.
        batch: places of a microbatch.
        accumulate: microbatches of a lease.
    """

    def __init__(self, dealer: Dealer, begin: int, items: int, batch: int, accumulate: int) -> None:
        self._dealer = dealer
        self._begin, self._items = begin, items
        self._batch, self._places = batch, batch * accumulate
        self._held: deque[Any] = deque()  # leases that aren't trained
        self._fetched: deque[tuple[Share, Any]] = deque()  # with their leases
        self.end = begin  # of the section, once it is over
        self.over = False

    def plan(self, section: Section) -> int:
        """Return how many leases the section has."""
        left = -(-(self._items - self._begin) // self._places)
        return min(left, section(self._begin // self._places, left))

    def shares(self) -> Iterator[Share]:
        """Yield the microbatches of lease after lease, as long as there are any for this rank now."""
        while True:
            granted = self._dealer.ask(wait=not self._held)
            if granted.lease is None:
                if granted.over:
                    self.over, self.end = True, min(self._items, self._begin + granted.count * self._places)
                return
            self._held.append(granted)
            for share in self._shares_of(granted):
                self._fetched.append((share, granted))
                yield share

    def _shares_of(self, granted: Any) -> Iterator[Share]:
        begin = self._begin + granted.lease * self._places
        end = min(begin + self._places, self._items)
        together = self._dealer.leases_per_update
        first = granted.lease - granted.lease % together
        window = self._begin + first * self._places
        window_end = min(window + together * self._places, self._items)
        granted.share = (end - begin) / max(1, window_end - window)
        count = -(-(end - begin) // self._batch)
        for number in range(count):
            low = begin + number * self._batch
            yield Share(
                low, min(low + self._batch, end), window, window_end, number == 0, number == count - 1, False, count
            )

    def taken(self, data: Iterator[Any]) -> Iterator[tuple[Share, Any]]:
        """Yield the microbatches that were fetched; a lease is done when the next microbatch is asked for."""
        for batch in data:
            share, granted = self._fetched.popleft()
            if share.opens:
                self._dealer.lease = granted
            yield share, batch
            if share.closes:
                self._held.popleft()
