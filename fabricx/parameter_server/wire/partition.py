"""Partition of parameter elements over servers, and their places in the servers' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Elements [start, stop) of a parameter that is seen as one vector; `parameter` is its number."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return its elements."""
        return self.stop - self.start


class Rows(NamedTuple):
    """Every `step`-th row of a parameter of two dimensions, from `first` on: `height` of them, each of `width`."""

    parameter: int
    first: int
    step: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """Return its elements."""
        return self.height * self.width


@final
@dataclass
class Shard:
    """What one server keeps.

    Its vector of weights is all pieces and then all rows, one after the other. The vector in which a gradient
    travels is the same, with room for the numbers of rows before each part of them: an integer as wide as an element.

    Attributes:
        pieces: of parameters whose gradients are dense.
        rows: of parameters of whose gradients only some rows are there.
        spans: where each lies in the weights: pieces, then rows.
        rooms: where each lies in the vector in which gradients travel.
        dense: elements of all pieces.
        size: elements of the weights.
        room: elements of the vector in which gradients travel.
    """

    pieces: list[Piece]
    rows: list[Rows] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = [part.size for part in self.parts]
        rooms = [piece.size for piece in self.pieces] + [part.height + part.size for part in self.rows]
        self.spans = _one_after_the_other(sizes)
        self.rooms = _one_after_the_other(rooms)
        self.dense = sum(piece.size for piece in self.pieces)
        self.size, self.room = sum(sizes), sum(rooms)

    @property
    def parts(self) -> list[Piece | Rows]:
        """Return all of it, in its order."""
        return [*self.pieces, *self.rows]

    def rows_in(self, vector: Tensor, table: int, count: int) -> tuple[Tensor, Tensor]:
        """Return rows in a vector in which gradients travel: their numbers, [count], and values, [count, width]."""
        start, width = self.rooms[len(self.pieces) + table][0], self.rows[table].width
        numbers = vector[start : start + count].view(torch.int32 if vector.element_size() == 4 else torch.int64)
        return numbers, vector[start + count : start + count * (1 + width)].view(count, width)


def _one_after_the_other(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def divide(
    shapes: Sequence[Sequence[int]], servers: int, *, whole: bool = False, by_row: frozenset[int] = frozenset()
) -> list[Shard]:  # fmt: skip
    """Divide parameters among servers, by size.

    Args:
        shapes: of each parameter.
        servers: how many.
        whole: don't cut a parameter; the largest go first, each to the server that has least.
        by_row: numbers of the parameters of which servers take rows in turn.

    Returns:
        what each server keeps, by parameter.

    >>> [shard.pieces for shard in divide([[3], [5]], 2)]  # doctest: +NORMALIZE_WHITESPACE
    [[Piece(parameter=0, start=0, stop=3), Piece(parameter=1, start=0, stop=1)],
     [Piece(parameter=1, start=1, stop=5)]]
    >>> [shard.rows for shard in divide([[3, 2]], 2, by_row=frozenset({0}))]  # doctest: +NORMALIZE_WHITESPACE
    [[Rows(parameter=0, first=0, step=2, height=2, width=2)], [Rows(parameter=0, first=1, step=2, height=1, width=2)]]
    """
    sizes = [_product(shape) if number not in by_row else 0 for number, shape in enumerate(shapes)]
    pieces = _whole(sizes, servers) if whole else _cut(sizes, servers)
    return [
        Shard(
            [piece for piece in mine if piece.parameter not in by_row],
            [Rows(n, server, servers, len(range(server, shapes[n][0], servers)), _product(shapes[n][1:]))
             for n in sorted(by_row)],
        )
        for server, mine in enumerate(pieces)
    ]  # fmt: skip


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def _whole(sizes: Sequence[int], servers: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = min(pieces, key=lambda mine: sum(piece.stop for piece in mine))
        least.append(Piece(number, 0, sizes[number]))
    return [sorted(mine) for mine in pieces]


def _cut(sizes: Sequence[int], servers: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    bounds = [sum(sizes) * server // servers for server in range(servers + 1)]
    begin = 0
    for number, size in enumerate(sizes):
        for mine, low, high in zip(pieces, bounds, bounds[1:], strict=False):
            first, last = max(low, begin), min(high, begin + size)
            if first < last:
                mine.append(Piece(number, first - begin, last - begin))
        begin += size
    return pieces


def together(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same elements in as few spans as can be.

    >>> together([(0, 2), (2, 5), (6, 7)])
    [(0, 5), (6, 7)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]  # noqa: PLW2901
        found.append((start, stop))
    return found
