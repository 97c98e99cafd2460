"""Global order of an epoch, cut into global batches and shares of ranks: pure functions of integers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import torch
from torch import Tensor


def epoch_seed(seed: int, epoch: int) -> int:
    """Mix seed and epoch to a seed far from those of neighbouring epochs (splitmix64, Steele et al. 2014).

    Args:
        seed: seed of the run.
        epoch: number of the epoch.
    """
    mixed = (seed + 0x9E3779B97F4A7C15 * (epoch + 1)) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)


def epoch_order(items: int, seed: int, epoch: int) -> Tensor:
    """Return the permutation of an epoch, the same on every rank and for any number of ranks.

    Args:
        items: length of the order.
        seed: seed of the run.
        epoch: number of the epoch.

    Returns:
        Tensor of shape [items], int64.
    """
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(items, generator=generator)


class Share(NamedTuple):  # a named tuple: created for each batch, five times faster than a frozen dataclass
    """A rank's share of one microbatch of a global batch.

    Attributes:
        begin, end: positions in the global order; equal for an empty share.
        window_begin, window_end: positions of the whole global batch.
        opens, closes: first and last microbatch of the accumulation window.
        last: last microbatch of the epoch.
        planned: microbatches of the window.
        incomplete: more microbatches that count as the same batch follow.
        idle: ranks with an empty share of the microbatch.
    """

    begin: int
    end: int
    window_begin: int
    window_end: int
    opens: bool
    closes: bool
    last: bool
    planned: int
    incomplete: bool = False
    idle: tuple[int, ...] = ()


def divide(places: int, weights: Sequence[float], first: int = 0) -> list[int]:
    """Divide items in proportion to weights, by largest remainder (Hamilton, 1792); the parts sum to all items.

    Ties go to the weights from number `first` on, in cyclic order.

    Args:
        places: number of items.
        weights: positive, shape [ranks].
        first: number of the weight that wins ties.


    >>> divide(16, [1, 1, 2]), divide(5, [1, 1]), divide(5, [1, 1], first=1)
    ([4, 4, 8], [3, 2], [2, 3])
    """
    total = sum(weights)
    exact = [places * weight / total for weight in weights]
    parts = [int(part) for part in exact]
    count = len(parts)
    order = sorted(range(count), key=lambda n: (round(parts[n] - exact[n], 9), (n - first) % count))
    for n in order[: places - sum(parts)]:
        parts[n] += 1
    return parts


@final
@dataclass(frozen=True)
class Shares:
    """Relative shares of the ranks in a global batch.

    Attributes:
        weights: relative share of each rank.
        turns: rotate over the ranks which rank receives the remainder, from global batch to global batch.
        most: maximum samples of a microbatch, by rank; a larger share is computed in several. None for no maximum.
    """

    weights: tuple[float, ...]
    turns: bool = False
    most: tuple[int, ...] | None = None

    def cut(self, start: int, stop: int, turn: int, count: int) -> list[list[int]]:
        """Return the boundaries of each rank's microbatches in a global batch.

        All ranks have the same number of microbatches, so a rank that needs fewer has empty ones, at the beginning.

        Args:
            start, stop: positions of the global batch.
            turn: number of the global batch, for the rotation of remainders.
            count: minimum number of microbatches.

        Returns:
            Boundaries by rank, shape [ranks, microbatches + 1].
        >>> Shares((3.0, 1.0), most=(4, 4)).cut(0, 12, 0, count=1)
        [[0, 3, 6, 9], [9, 9, 9, 12]]
        """
        sizes = divide(stop - start, self.weights, turn % len(self.weights) if self.turns else 0)
        needed = [count] * len(sizes)
        if self.most is not None:
            needed = [max(count, -(-size // most)) for size, most in zip(sizes, self.most, strict=True)]
        begins = itertools.accumulate(sizes, initial=start)
        return [
            [begin] * (max(needed) - pieces) + [begin + size * number // pieces for number in range(pieces + 1)]
            for begin, size, pieces in zip(begins, sizes, needed, strict=False)
        ]


@final
@dataclass
class Balance:
    """Changes of the ranks' shares over the run; all ranks record the same changes before the data is loaded.

    Attributes:
        changes: (epoch, position, shares), sorted; before the first change, and for other numbers of ranks, shares are
            equal.
    """

    changes: list[tuple[int, int, Shares]] = field(default_factory=list)

    def change(
        self, epoch: int, position: int, weights: tuple[float, ...], *, turns: bool = False,
        most: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Change the shares from a global batch on, which no rank has cut yet.

        Args:
            epoch: number of the epoch.
            position: position of the global batch in the order.
            weights, turns, most: see `Shares`.
        """
        # Eight earlier changes suffice: loaders are not further ahead.
        self.changes = [*self.changes[-8:], (epoch, position, Shares(weights, turns, most))]

    def at(self, epoch: int, position: int, ranks: int) -> Shares | None:
        """Return the shares in a global batch; None for equal shares.

        Args:
            epoch: number of the epoch.
            position: position of the global batch in the order.
            ranks: number of ranks.
        """
        count = bisect.bisect_right(self.changes, (epoch, position), key=lambda change: change[:2])
        shares = self.changes[count - 1][2] if count else None
        return shares if shares is not None and len(shares.weights) == ranks else None


@dataclass(frozen=True)
class Cut:
    """Division of an order of `items` positions for one rank.

    A global batch has `batch * began_with * accumulate` items; the last global batch has the remainder. Rank r receives
    the r-th part (sizes differ by at most 1) and processes it in microbatches of `batch`. All ranks have the same
    number of microbatches; a rank with a smaller part has empty microbatches at its end (with unequal shares at its
    begin). Therefore a weight update
    consists of the same samples for any number of ranks, while `began_with` stays the same. With `parts`, each global
    batch is divided into that number of equal microbatches, the same for any number of ranks; a smaller one into single
    items.

    Args:
        items: used items, at most the length of the order.
        batch: items of a microbatch on one rank.
        rank, ranks: number of this rank, and number of ranks.
        accumulate: microbatches of an accumulation window.
        began_with: number of ranks that determines the global batch size; 0 for `ranks`.
        parts: microbatches per global batch, at most its items; 0 for microbatches of `batch` items.
        balance: shares of the ranks; they do not change which samples make up an update.
        epoch: epoch of the order.
        undivided: a rank's share of a global batch is one microbatch of any size, for steps that can't be divided.

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
        """Return the number of items of a complete global batch."""
        return self.batch * (self.began_with or self.ranks) * self.accumulate

    def __len__(self) -> int:
        """Return the number of microbatches per epoch, the same on every rank.

        >>> len(Cut(items=10, batch=4)), len(Cut(items=10, batch=4, ranks=2))
        (3, 2)
        >>> len(Cut(items=10, batch=4, began_with=2)), len(Cut(items=10, batch=4, parts=3))
        (3, 8)
        >>> len(Cut(items=10, batch=4, began_with=2, undivided=True))
        2
        """
        whole, rest = divmod(self.items, self.global_batch)
        return whole * self._microbatches(self.global_batch) + self._microbatches(rest)

    @property
    def leaves_out(self) -> bool:
        """Return whether any rank has an empty share of any microbatch.

        >>> [Cut(items=items, batch=4, ranks=2).leaves_out for items in (16, 17, 18)]
        [False, True, False]
        >>> Cut(items=9, batch=4, ranks=2, accumulate=2).leaves_out, Cut(16, 4, ranks=3, began_with=4).leaves_out
        (True, False)
        """
        windows = {min(self.items, self.global_batch), self.items % self.global_batch}
        return any(share.idle for places in windows for share in replace(self, items=places).shares())

    def batches_before(self, position: int) -> int:
        """Number the microbatches from a position on so that the last has the same number as in a full epoch.

        Args:
            position: items that are trained already.

        Returns:
            Number of the first microbatch from `position`.

        >>> cut = Cut(items=10, batch=4, ranks=2)
        >>> [cut.batches_before(position) for position in (0, 2, 8, 10)]
        [0, 1, 1, 2]
        """
        return max(0, len(self) - len(replace(self, items=max(0, self.items - position))))

    def completes(self, planned: Cut, share: Share, number: int) -> range:
        """Return the numbers of the batches of another cut that a microbatch of this cut completes.

        Args:
            planned: cut of the same items into the same global batches.
            share: a microbatch of this cut.
            number: its number within its global batch, without those that are `incomplete`.

        >>> one, two = Cut(items=16, batch=4, began_with=2), Cut(items=16, batch=4, ranks=2)
        >>> [list(one.completes(two, share, n % 2)) for n, share in enumerate(one.shares())]
        [[], [0], [], [1]]
        >>> two = Cut(items=32, batch=4, ranks=2, accumulate=2, began_with=1)
        >>> [list(two.completes(Cut(items=32, batch=4, accumulate=2), share, 0)) for share in two.shares(8)]
        [[2, 3], [4, 5], [6, 7]]
        """
        places = share.window_end - share.window_begin
        before = planned.batches_before(share.window_begin)
        theirs, own = planned._microbatches(places), self._microbatches(places)
        return range(before + number * theirs // own, before + (number + 1) * theirs // own)

    def _microbatches(self, places: int) -> int:
        if self.parts:
            return -(-min(self.parts, places) // self.ranks)
        if self.undivided:
            return 1 if places else 0
        largest = -(-places // self.ranks)
        return -(-largest // self.batch)

    def shares(self, position: int = 0) -> Iterator[Share]:
        """Yield the microbatches from a position on.

        Args:
            position: items that are trained already.

        >>> [(s.begin, s.end) for s in Cut(items=5, batch=2, rank=1, ranks=2).shares()]
        [(2, 4), (5, 5)]
        >>> [[(s.begin, s.end) for s in Cut(9, 9, rank, ranks=2, parts=3).shares()] for rank in (0, 1)]
        [[(0, 3), (3, 6)], [(6, 9), (9, 9)]]
        >>> [share.idle for share in Cut(items=8, batch=2, ranks=3, accumulate=2).shares()]
        [(), (2,)]
        """
        global_batch = self.global_batch
        whole = self._equal(min(global_batch, self.items))
        for start in range(position, self.items, global_batch):
            stop = min(start + global_batch, self.items)
            if (shares := self.balance.at(self.epoch, start, self.ranks)) is not None:
                yield from self._unequal(shares, start, stop)
                continue
            microbatches = whole if stop - start == global_batch else self._equal(stop - start)
            count = len(microbatches)
            for number, (low, high, idle) in enumerate(microbatches):
                closes = number == count - 1
                last = closes and stop == self.items
                yield Share(start + low, start + high, start, stop, number == 0, closes, last, count, idle=idle)

    def _equal(self, places: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return this rank's microbatches of a global batch in equal shares.

        Args:
            places: items of the global batch.

        Returns:
            Begin and end, counted from the start of the global batch, and the ranks without an item; by microbatch.
        """
        if not places:
            return []
        pieces = min(self.parts or places, places)  # none without an item: the first microbatch has one
        size, extra = divmod(pieces, self.ranks)
        begin = self.rank * size + min(self.rank, extra)
        end = begin + size + (self.rank < extra)
        stride = 1 if self.parts else -(-places // self.ranks) if self.undivided else self.batch
        microbatches = []
        for number in range(self._microbatches(places)):
            done = number * stride
            low = min(begin + done, end)
            high = min(low + stride, end)
            idle = () if done < size else tuple(range(extra if done == size else 0, self.ranks))
            if self.parts:
                low, high = low * places // pieces, high * places // pieces
            microbatches.append((low, high, idle))
        return microbatches

    def _unequal(self, shares: Shares, start: int, stop: int) -> Iterator[Share]:
        planned = self._microbatches(stop - start)
        turn = self.epoch + start // self.global_batch
        ranks = shares.cut(start, stop, turn, planned)
        bounds = ranks[self.rank]
        count = len(bounds) - 1
        for number in range(count):
            closes = number == count - 1
            idle = tuple(rank for rank, places in enumerate(ranks) if places[number] == places[number + 1])
            yield Share(
                bounds[number], bounds[number + 1], start, stop, number == 0, closes, closes and stop == self.items,
                count, incomplete=number < count - planned, idle=idle,
            )  # fmt: skip
