"""Each element of the parameters is on a single server."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricx.parameter_server.wire.partition import divide

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 5), st.booleans(), st.data())
def test_each_element_is_on_one_server(shapes: list[list[int]], servers: int, whole: bool, data: st.DataObject) -> None:
    tables = [number for number, shape in enumerate(shapes) if len(shape) == 2 and shape[1]]
    by_row = frozenset(data.draw(st.sets(st.sampled_from(tables))) if tables else ())
    shards = divide(shapes, servers, whole=whole, by_row=by_row)
    assert len(shards) == servers
    held: Counter[tuple[int, int]] = Counter()
    for shard in shards:
        for piece in shard.pieces:
            held.update((piece.parameter, element) for element in range(piece.start, piece.stop))
        for rows in shard.rows:
            numbers = range(rows.first, shapes[rows.parameter][0], rows.step)
            assert len(numbers) == rows.height
            held.update((rows.parameter, r * rows.width + c) for r in numbers for c in range(rows.width))
        assert shard.size == sum(stop - start for start, stop in shard.spans)
        assert shard.room == shard.size + sum(rows.height for rows in shard.rows)
    assert held == Counter((n, element) for n, shape in enumerate(shapes) for element in range(math.prod(shape)))
    dense = [shard.dense for shard in shards]
    if whole:  # servers differ by at most the largest parameter
        largest = max((math.prod(s) for n, s in enumerate(shapes) if n not in by_row), default=0)
        assert max(dense) - min(dense) <= largest
    else:
        assert max(dense) - min(dense) <= 1


def test_rows_follow_their_indices_in_the_gradient_vector() -> None:
    [shard] = divide([[3], [4, 2]], 1, by_row=frozenset({1}))
    vector = torch.zeros(shard.room)
    numbers, values = shard.rows_in(vector, 0, 2)
    numbers.copy_(torch.tensor([3, 1]))
    values.copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    assert numbers.dtype == torch.int32  # as wide as an element
    assert vector[3:5].view(torch.int32).tolist() == [3, 1]
    assert vector[5:9].tolist() == [5.0, 6.0, 7.0, 8.0]
    assert vector[:3].tolist() == [0.0] * 3
    assert shard.rows_in(vector.double(), 0, 1)[0].dtype == torch.int64
