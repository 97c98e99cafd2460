"""Partition of parameter elements over servers, and their positions in the servers' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Elements [start, stop) of a flattened parameter; `parameter` is its number."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start


class Rows(NamedTuple):
    """Rows first, first + step, ... of a two-dimensional parameter: `height` rows of `width` elements."""

    parameter: int
    first: int
    step: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.height * self.width


@final
@dataclass
class Shard:
    """A server's part of the parameters.

    The server's vector of weights is the concatenation of all pieces and all rows. The vector of gradients has the same
    order, with room for row ids (integers as wide as an element) before the rows of each table.

    Attributes:
        pieces: pieces of parameters with dense gradients.
        rows: rows of parameters with sparse gradients.
        spans: position of each part in the vector of weights: pieces, then rows.
        rooms: position of each part in the vector of gradients.
        dense: elements of all pieces.
        size: elements of the vector of weights.
        room: elements of the vector of gradients.
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
        """Return all parts: pieces, then rows."""
        return [*self.pieces, *self.rows]

    def rows_in(self, vector: Tensor, table: int, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the rows in a vector of gradients: ids [count], and values [count, width].

        Args:
            vector: vector of gradients.
            table: number among `rows`.
            count: number of rows.
        """
        start, width = self.rooms[len(self.pieces) + table][0], self.rows[table].width
        numbers = vector[start : start + count].view(torch.int32 if vector.element_size() == 4 else torch.int64)
        return numbers, vector[start + count : start + count * (1 + width)].view(count, width)


def _one_after_the_other(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def divide(
    shapes: Sequence[Sequence[int]], servers: int, *, whole: bool = False, by_row: frozenset[int] = frozenset()
) -> list[Shard]:  # fmt: skip
    """Divide parameters over servers, balanced by size.

    Args:
        shapes: shapes of the parameters.
        servers: number of servers.
        whole: keep parameters whole; the largest are assigned first, each to the server with the fewest elements.
        by_row: numbers of the parameters whose rows are distributed cyclically.

    Returns:
        The part of each server.


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
            [piece for piece in assigned if piece.parameter not in by_row],
            [Rows(n, server, servers, len(range(server, shapes[n][0], servers)), _product(shapes[n][1:]))
             for n in sorted(by_row)],
        )
        for server, assigned in enumerate(pieces)
    ]  # fmt: skip


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def _whole(sizes: Sequence[int], servers: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = min(pieces, key=lambda assigned: sum(piece.stop for piece in assigned))
        least.append(Piece(number, 0, sizes[number]))
    return [sorted(assigned) for assigned in pieces]


def _cut(sizes: Sequence[int], servers: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    bounds = [sum(sizes) * server // servers for server in range(servers + 1)]
    begin = 0
    for number, size in enumerate(sizes):
        for assigned, low, high in zip(pieces, bounds, bounds[1:], strict=False):
            first, last = max(low, begin), min(high, begin + size)
            if first < last:
                assigned.append(Piece(number, first - begin, last - begin))
        begin += size
    return pieces


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans.

    Args:
        spans: (start, stop) in ascending order.

    >>> merge_spans([(0, 2), (2, 5), (6, 7)])
    [(0, 5), (6, 7)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]  # noqa: PLW2901
        merged.append((start, stop))
    return merged
