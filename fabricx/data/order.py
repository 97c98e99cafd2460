"""One global order per epoch, cut into global batches and ranks' shares: pure functions of a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def epoch_seed(seed: int, epoch: int) -> int:
    """Return a seed for an epoch, far from those of its neighbours (splitmix64, Steele et al. 2014)."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (epoch + 1)) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)


def epoch_order(items: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of an epoch, shape [items]; the same on every rank and for any number of them."""
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(items, generator=generator)


class Share(NamedTuple):  # a tuple: one is made per batch, and a frozen dataclass takes five times as long
    """A rank's part of one microbatch of a global batch.

    Attributes:
        begin, end: which places of the global order; none where they are equal.
        window_begin, window_end: the places of the whole global batch.
        opens, closes: first and last microbatch of the accumulation window.
        last: last microbatch of the epoch.
        planned: microbatches of the window.
    """

    begin: int
    end: int
    window_begin: int
    window_end: int
    opens: bool
    closes: bool
    last: bool
    planned: int


@dataclass(frozen=True)
class Cut:
    """How an order of `items` places is cut for one rank.

    A global batch takes `batch * began_with * accumulate` places, the last one what is left. Rank r takes the r-th part
    (sizes differ by at most one) and goes through it in microbatches of `batch`. All ranks have the same number of
    microbatches; a rank whose part ends earlier has empty ones. So the same samples make up a weight update whatever
    the number of ranks, as long as `began_with` stays. With `parts`, a microbatch is one of so many equal parts of the
    global batch, which are the same whatever the number of ranks.

    Args:
        items: places that are used, at most the length of the order.
        batch: places of a microbatch on one rank.
        rank, ranks: which part of how many.
        accumulate: microbatches of a window.
        began_with: ranks that the global batch was fixed for; 0 if those that there are.
        parts: see above; 0 for microbatches of `batch`.

    >>> [len(list(Cut(items=16, batch=4, ranks=ranks, began_with=2).shares())) for ranks in (1, 2, 3, 4)]
    [4, 2, 2, 2]
    """

    items: int
    batch: int
    rank: int = 0
    ranks: int = 1
    accumulate: int = 1
    began_with: int = 0
    parts: int = 0

    @property
    def global_batch(self) -> int:
        """Return the places of a whole global batch."""
        return self.batch * (self.began_with or self.ranks) * self.accumulate

    def __len__(self) -> int:
        """Return the microbatches of an epoch, the same on every rank.

        >>> len(Cut(items=10, batch=4)), len(Cut(items=10, batch=4, ranks=2))
        (3, 2)
        >>> len(Cut(items=10, batch=4, began_with=2)), len(Cut(items=10, batch=4, parts=3))
        (3, 9)
        """
        whole, rest = divmod(self.items, self.global_batch)
        return whole * self._microbatches(self.global_batch) + self._microbatches(rest)

    def batches_before(self, position: int) -> int:
        """Return the microbatches ahead of a position, which is where a global batch begins.

        >>> Cut(items=10, batch=4, ranks=2).batches_before(8)
        1
        """
        return position // self.global_batch * self._microbatches(self.global_batch)

    def _microbatches(self, places: int) -> int:
        if self.parts:
            return -(-self.parts // self.ranks) if places else 0
        largest = -(-places // self.ranks)
        return -(-largest // self.batch)

    def shares(self, position: int = 0) -> Iterator[Share]:
        """Yield the microbatches from a position (a number of places) on.

        >>> [(s.begin, s.end) for s in Cut(items=5, batch=2, rank=1, ranks=2).shares()]
        [(2, 4), (5, 5)]
        >>> [[(s.begin, s.end) for s in Cut(9, 9, rank, ranks=2, parts=3).shares()] for rank in (0, 1)]
        [[(0, 3), (3, 6)], [(6, 9), (9, 9)]]
        """
        for start in range(position, self.items, self.global_batch):
            stop = min(start + self.global_batch, self.items)
            pieces, places = self.parts or stop - start, stop - start
            size, extra = divmod(pieces, self.ranks)
            begin = self.rank * size + min(self.rank, extra)
            end = begin + size + (self.rank < extra)
            each, count = 1 if self.parts else self.batch, self._microbatches(places)
            for number in range(count):
                low = min(begin + number * each, end)
                high = min(low + each, end)
                if self.parts:
                    low, high = low * places // pieces, high * places // pieces
                closes = number == count - 1
                last = closes and stop == self.items
                yield Share(start + low, start + high, start, stop, number == 0, closes, last, count)
