"""Which samples are in the weights of a server: an account beside the leases."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import final

Span = tuple[int, int, int]  # epoch, and the range of positions in its data order


@final
class SampleLedger:
    """Positions of the data order with samples that are in a server's weights.

    Part of the state of the weights, and written where these change. The count depends neither on leases nor on the
    records from which workers recover, so that it shows their mistakes.

    Attributes:
        begin: (epoch, position) of the first section; None before it.
        repeated: samples that were in the weights already.
    """

    def __init__(self) -> None:
        self.begin: tuple[int, int] | None = None
        self.repeated = 0
        self._items: dict[int, int] = {}
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # disjoint, in order, not adjacent

    def open(self, epoch: int, position: int, items: int) -> None:
        """Record a section of the data.

        Args:
            epoch: number of the epoch.
            position: start of the section in the epoch's order.
            items: length of that order.
        """
        if self.begin is None:
            self.begin = epoch, position
        self._items[epoch] = items

    def add(self, spans: Iterable[Span]) -> None:
        """Count samples that are in the weights from now on, or that had no gradient.

        Args:
            spans: of the samples.
        """
        for epoch, begin, end in spans if self.begin is not None else ():
            ranges = self._ranges.setdefault(epoch, [])
            low = bisect_left(ranges, begin, key=lambda known: known[1])  # ends at `begin` or later
            high = low
            while high < len(ranges) and ranges[high][0] <= end:
                high += 1
            joined = ranges[low:high]
            self.repeated += sum(min(end, last) - max(begin, first) for first, last in joined)
            whole = min([begin, *(first for first, _ in joined)]), max([end, *(last for _, last in joined)])
            ranges[low:high] = [whole]

    def lost_and_repeated(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the samples that are missing in the weights, and the samples that were trained twice.

        Samples beyond the end, or before the start, count as trained twice: an earlier or a later run trains them.

        Args:
            epoch, position: end of the training.
        """
        if self.begin is None:
            return 0, 0
        due = inside = 0
        for number in range(self.begin[0], epoch + 1):
            first = self.begin[1] if number == self.begin[0] else 0
            last = position if number == epoch else self._items.get(number, next(reversed(self._items.values())))
            due += max(0, last - first)
            ranges = self._ranges.get(number, ())
            inside += sum(max(0, min(last, end) - max(first, begin)) for begin, end in ranges)
        trained = sum(end - begin for ranges in self._ranges.values() for begin, end in ranges)
        return due - inside, self.repeated + trained - inside
