"""Leases of the data order, for ranks that work at their own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

from fabricx.core.strategy_support.dealer import Dealer
from fabricx.data.order import Share

Section = Callable[[int, int | float], int]  # (trained leases, remaining leases) -> leases until the ranks meet


@final
class LeasedSection:
    """A section on one rank: its leases and their positions in the order.

    Args:
        dealer: distributes the leases.
        begin: first position of the section.
        items: end of the order.
        batch: samples of a microbatch.
        accumulate: microbatches of a lease.

    Attributes:
        end: end of the section, valid when it is over.
        over: the section is over.
    """

    def __init__(self, dealer: Dealer, begin: int, items: int, batch: int, accumulate: int) -> None:
        self._dealer = dealer
        self._begin, self._items = begin, items
        self._batch, self._places = batch, batch * accumulate
        self._held: deque[Any] = deque()  # leases that are not trained yet
        self._fetched: deque[tuple[Share, Any]] = deque()  # fetched microbatches with their leases
        self.end = begin
        self.over = False

    def plan(self, section: Section) -> int:
        """Return the number of leases of the section.

        Args:
            section: determines the number.
        """
        remaining = -(-(self._items - self._begin) // self._places)
        return min(remaining, section(self._begin // self._places, remaining))

    def shares(self) -> Iterator[Share]:
        """Yield the microbatches of this rank's leases until the dealer has no further lease at present."""
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
        """Yield the fetched microbatches; a lease is complete when the next microbatch is requested.

        Args:
            data: batches of the microbatches that `shares` has yielded.
        """
        for batch in data:
            share, granted = self._fetched.popleft()
            if share.opens:
                self._dealer.lease = granted
            yield share, batch
            if share.closes:
                self._held.popleft()
