"""Which server keeps which elements of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Elements [start, stop) of a parameter that is seen as one vector; `parameter` is its number."""

    parameter: int
    start: int
    stop: int


def cut(sizes: Sequence[int], servers: int, *, whole: bool = False) -> list[list[Piece]]:
    """Divide parameters among servers, by size.

    Args:
        sizes: elements of each parameter.
        servers: how many.
        whole: don't cut a parameter; the largest go first, each to the server that has least.

    Returns:
        the pieces of each server, by parameter.

    >>> cut([3, 5], 2)
    [[Piece(parameter=0, start=0, stop=3), Piece(parameter=1, start=0, stop=1)], [Piece(parameter=1, start=1, stop=5)]]
    >>> cut([3, 5, 1], 2, whole=True)
    [[Piece(parameter=1, start=0, stop=5)], [Piece(parameter=0, start=0, stop=3), Piece(parameter=2, start=0, stop=1)]]
    """
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
    if whole:
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            least = min(pieces, key=lambda mine: sum(piece.stop for piece in mine))
            least.append(Piece(number, 0, sizes[number]))
        return [sorted(mine) for mine in pieces]
    bounds = [sum(sizes) * server // servers for server in range(servers + 1)]
    begin = 0
    for number, size in enumerate(sizes):
        for mine, low, high in zip(pieces, bounds, bounds[1:], strict=False):
            first, last = max(low, begin), min(high, begin + size)
            if first < last:
                mine.append(Piece(number, first - begin, last - begin))
        begin += size
    return pieces
