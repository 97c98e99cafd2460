"""Leases of the data order, for ranks that work at their own pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from fabricx.data.order import Share


class Dealer(Protocol):
    """Distributes leases to ranks; implemented by `fabricx.parameter_server`.

    Attributes:
        lease: lease that this rank is training.
        section: number of the newest section.
        planned: number of workers at the begin of the run.
        scheduled: number of updates that step schedulers have followed.
        dropped: the newest gradient arrived too late, and its data will be leased again.
        keeps_state: batches change buffers or metric objects of this rank's module; set before training starts.
        may_drop: gradients may be dropped, and this rank has state to restore then.
        begins_update: the lease is the first whose gradient is not sent yet.
        workers: numbers of the training workers, by rank.
    """

    lease: Any
    section: int
    planned: int
    scheduled: int
    dropped: bool
    keeps_state: bool
    may_drop: bool
    begins_update: bool
    workers: tuple[int, ...]

    def position(self) -> Any:
        """Return the state that a worker that joins later needs for `take_position`."""

    def take_position(self, position: Any) -> None:
        """Continue at the position of another worker.

        Args:
            position: result of `position`.
        """

    @property
    def leases_per_update(self) -> int:
        """Return the number of leases per update."""
        ...

    def open(self, leases: int) -> None:
        """Begin a section; every rank calls it.

        Args:
            leases: number of leases of the section.
        """

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return (leases missing in the weights, leases trained twice, step at which counting began).

        Called when all ranks have met and all sections are over.
        """
        ...

    def mark(self) -> None:
        """Note the state of this rank before a lease with `begins_update`."""

    def take_back(self) -> None:
        """Return to the state of `mark`, because the gradient since then was dropped."""

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease.

        Args:
            take_logged: returns the metric sums that the lease has logged, which are sent with its gradient.
        """

    def logged(self) -> dict[str, Any]:
        """Return the metric sums of all ranks for those gradients of the newest section that are in the weights.

        Called when all ranks have met and the section is over.
        """
        ...

    def ask(self, *, wait: bool) -> Any:
        """Request a lease.

        Args:
            wait: this rank holds no lease; wait until there is a lease or the section is over.
        """


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
