"""One global order per epoch, cut into global batches and ranks' shares: pure functions of a few numbers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

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
        part: others that count as the same batch follow.
        idle: ranks that have no place of the microbatch.
    """

    begin: int
    end: int
    window_begin: int
    window_end: int
    opens: bool
    closes: bool
    last: bool
    planned: int
    part: bool = False
    idle: int = 0


def divide(places: int, weights: Sequence[float], first: int = 0) -> list[int]:
    """Divide places in proportion to weights, by largest remainder (Hamilton, 1792), so that all are given.

    Where remainders are equal the `first` of the weights has the precedence, and then the ones after it.

    >>> divide(16, [1, 1, 2]), divide(5, [1, 1]), divide(5, [1, 1], first=1)
    ([4, 4, 8], [3, 2], [2, 3])
    """
    total = sum(weights)
    exact = [places * weight / total for weight in weights]
    given = [int(part) for part in exact]
    count = len(given)
    order = sorted(range(count), key=lambda n: (round(given[n] - exact[n], 9), (n - first) % count))
    for n in order[: places - sum(given)]:
        given[n] += 1
    return given


@final
@dataclass(frozen=True)
class Shares:
    """Who gets how much of a global batch.

    Attributes:
        weights: one for each rank.
        turns: what is left over goes to each rank in turn, from global batch to global batch.
        most: samples of a microbatch, by rank; those of a larger share are computed in several. None for any number.
    """

    weights: tuple[float, ...]
    turns: bool = False
    most: tuple[int, ...] | None = None

    def cut(self, start: int, stop: int, turn: int, count: int) -> list[list[int]]:
        """Return where the microbatches of each rank begin and end in a global batch.

        All ranks have as many, so a rank that needs fewer has empty ones, before the others. A batch that would have
        been `count` microbatches is that many at least.

        >>> Shares((3.0, 1.0), most=(4, 4)).cut(0, 12, 0, count=1)
        [[0, 3, 6, 9], [9, 9, 9, 12]]
        """
        sizes = divide(stop - start, self.weights, turn % len(self.weights) if self.turns else 0)
        needed = [count] * len(sizes)
        if self.most is not None:
            needed = [max(count, -(-size // most)) for size, most in zip(sizes, self.most, strict=True)]
        begins = itertools.accumulate(sizes, initial=start)
        return [
            [begin] * (max(needed) - mine) + [begin + size * number // mine for number in range(mine + 1)]
            for begin, size, mine in zip(begins, sizes, needed, strict=False)
        ]


@final
@dataclass
class Balance:
    """The shares of the ranks, from which global batch on; all ranks change them alike, and in time.

    Attributes:
        changes: (epoch, place, shares), in this order; before the first, and for other numbers of ranks, all are equal.
    """

    changes: list[tuple[int, int, Shares]] = field(default_factory=list)

    def change(
        self, epoch: int, place: int, weights: tuple[float, ...], *, turns: bool = False,
        most: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Let shares hold from a global batch on, which isn't cut yet on any rank; see `Shares`."""
        self.changes = [*self.changes[-8:], (epoch, place, Shares(weights, turns, most))]  # loaders aren't so far ahead

    def at(self, epoch: int, place: int, ranks: int) -> Shares | None:
        """Return the shares of a global batch; None where all are equal."""
        found = bisect.bisect_right(self.changes, (epoch, place), key=lambda change: change[:2])
        shares = self.changes[found - 1][2] if found else None
        return shares if shares is not None and len(shares.weights) == ranks else None


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
        balance: of the ranks' shares; they are no part of the order, so the same samples make up an update.
        epoch: of which the order is.
        undivided: a rank's part of a global batch is one microbatch, however large: for steps that can't be divided.

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
    balance: Balance = field(default_factory=Balance)
    epoch: int = 0
    undivided: bool = False

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
        >>> len(Cut(items=10, batch=4, began_with=2, undivided=True))
        2
        """
        whole, rest = divmod(self.items, self.global_batch)
        return whole * self._microbatches(self.global_batch) + self._microbatches(rest)

    @property
    def leaves_out(self) -> bool:
        """Return whether some rank has no sample of some microbatch.

        >>> [Cut(items=items, batch=4, ranks=2).leaves_out for items in (16, 17, 18)]
        [False, True, False]
        >>> Cut(items=9, batch=4, ranks=2, accumulate=2).leaves_out, Cut(16, 4, ranks=3, began_with=4).leaves_out
        (True, False)
        """
        windows = {min(self.items, self.global_batch), self.items % self.global_batch} - {0}
        return any(places // self.ranks <= (self._microbatches(places) - 1) * self.batch for places in windows)

    def batches_before(self, position: int) -> int:
        """Return by which number the microbatches from a position on begin, so that the last one's is the same.

        >>> cut = Cut(items=10, batch=4, ranks=2)
        >>> [cut.batches_before(position) for position in (0, 2, 8, 10)]
        [0, 1, 1, 2]
        """
        return max(0, len(self) - len(replace(self, items=max(0, self.items - position))))

    def _microbatches(self, places: int) -> int:
        if self.parts:
            return -(-self.parts // self.ranks) if places else 0
        if self.undivided:
            return 1 if places else 0
        largest = -(-places // self.ranks)
        return -(-largest // self.batch)

    def shares(self, position: int = 0) -> Iterator[Share]:
        """Yield the microbatches from a position (a number of places) on.

        >>> [(s.begin, s.end) for s in Cut(items=5, batch=2, rank=1, ranks=2).shares()]
        [(2, 4), (5, 5)]
        >>> [[(s.begin, s.end) for s in Cut(9, 9, rank, ranks=2, parts=3).shares()] for rank in (0, 1)]
        [[(0, 3), (3, 6)], [(6, 9), (9, 9)]]
        >>> [share.idle for share in Cut(items=8, batch=2, ranks=3, accumulate=2).shares()]
        [0, 1]
        """
        for start in range(position, self.items, self.global_batch):
            stop = min(start + self.global_batch, self.items)
            if (shares := self.balance.at(self.epoch, start, self.ranks)) is not None:
                yield from self._unequal(shares, start, stop)
                continue
            pieces, places = self.parts or stop - start, stop - start
            size, extra = divmod(pieces, self.ranks)
            begin = self.rank * size + min(self.rank, extra)
            end = begin + size + (self.rank < extra)
            each, count = 1 if self.parts else self.batch, self._microbatches(places)
            if self.undivided:
                each = -(-places // self.ranks)
            for number in range(count):
                low = min(begin + number * each, end)
                high = min(low + each, end)
                idle = 0 if number * each < size and places >= pieces else self._idle(places, pieces, number * each)
                if self.parts:
                    low, high = low * places // pieces, high * places // pieces
                closes = number == count - 1
                last = closes and stop == self.items
                yield Share(start + low, start + high, start, stop, number == 0, closes, last, count, idle=idle)

    def _idle(self, places: int, pieces: int, done: int) -> int:
        """Return how many ranks have no place left in a global batch once each has had `done` pieces."""
        size, extra = divmod(pieces, self.ranks)
        if places >= pieces:
            return 0 if done < size else self.ranks - (extra if done == size else 0)
        own = [
            range(rank * size + min(rank, extra), (rank + 1) * size + min(rank + 1, extra))
            for rank in range(self.ranks)
        ]
        return sum(
            done >= len(mine) or mine[done] * places // pieces == (mine[done] + 1) * places // pieces for mine in own
        )

    def _unequal(self, shares: Shares, start: int, stop: int) -> Iterator[Share]:
        planned = self._microbatches(stop - start)
        turn = self.epoch + start // self.global_batch
        ranks = shares.cut(start, stop, turn, planned)
        bounds = ranks[self.rank]
        count = len(bounds) - 1
        for number in range(count):
            closes = number == count - 1
            idle = sum(places[number] == places[number + 1] for places in ranks)
            yield Share(
                bounds[number], bounds[number + 1], start, stop, number == 0, closes, closes and stop == self.items,
                count, part=number < count - planned, idle=idle,
            )  # fmt: skip
