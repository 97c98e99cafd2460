"""Detection of tensors stored by blocks that are wrong for other positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.model_parallel.context.stored_positions import StoredPositions


class Cache:
    """Keys of a text that is generated; a weak reference needs a class."""

    layers: Any = ()


def test_tensors_that_were_stored_for_a_shard_are_wrong_for_all_other_positions() -> None:
    block = nn.Module()
    block.register_buffer("table", torch.zeros(8))
    stored = StoredPositions([("blocks.0", block)])
    shard, longer = SequenceShard(8, 2, 0), SequenceShard(16, 2, 0)
    assert stored.begin(8, None) == {}
    block.whole = torch.arange(8)
    assert stored.begin(12, None) == {}  # its first rows are the rows of each whole sequence
    assert set(stored.begin(8, shard).values()) == {"blocks.0.whole"}
    assert stored.begin(8, shard) is None
    block.positions, block.pair = shard.positions, [torch.zeros(2, 4), torch.zeros(3)]
    block.register_buffer("rope", torch.zeros(4, 2))
    block.activation = torch.zeros(4, requires_grad=True)
    names = stored.begin(16, longer)
    assert sorted(names.values()) == ["blocks.0.pair", "blocks.0.positions", "blocks.0.rope", "blocks.0.whole"]
    assert names[id(block.positions)] == "blocks.0.positions"
    block.positions = longer.positions
    assert sorted(stored.begin(8, None).values()) == ["blocks.0.pair", "blocks.0.positions", "blocks.0.rope"]
    assert sorted(stored.begin(16, longer).values()) == ["blocks.0.pair", "blocks.0.rope", "blocks.0.whole"]
    assert stored.begin(16, SequenceShard(16, 2, 0, piece=5)) is not None  # the same length with other positions


def test_keys_of_a_shard_in_an_argument_are_wrong_for_the_next_word() -> None:
    stored = StoredPositions([])
    cache = Cache()
    cache.layers = [SimpleNamespace(keys=None, values=None)]
    assert stored.begin(7, SequenceShard(7, 2, 0), ((), {"past": cache})) == {}
    cache.layers[0].keys = torch.zeros(1, 2, 4, 3)
    names = stored.begin(1, None, ((), {"past": cache}))
    assert names == {id(cache.layers[0].keys): "argument 'past'.layers.keys"}
    assert stored.begin(7, SequenceShard(7, 2, 0), ((), {"past": Cache()})) is not None
    assert stored.begin(1, None) == {}  # the cache of another text is not an argument any more
