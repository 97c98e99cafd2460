"""Attention of a shard's queries is compared with the whole sequence; the keys of the other ranks are fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.distributed.world import World
from fabricx.model_parallel.context.attention import own_stream, scaled_dot_product_attention
from fabricx.model_parallel.context.sequence_shard import SequenceShard

RANKS, LENGTH = 2, 8


class FixedRanks:
    """The ranks along a context axis; `all_gather` finds a tensor's shards in the whole tensors."""

    size = RANKS

    def __init__(self, rank: int, wholes: list[Tensor], length: int = LENGTH) -> None:
        self.rank, self._wholes, self._length = rank, wholes, length

    def all_gather(self, local: Tensor, sync_grads: bool = False) -> Tensor:
        for whole in self._wholes:
            for dim in range(whole.dim()):
                if whole.shape[dim] == self._length:
                    parts = [SequenceShard(self._length, RANKS, rank).part(whole, dim) for rank in range(RANKS)]
                    if parts[self.rank].shape == local.shape and torch.equal(parts[self.rank], local):
                        return torch.stack(parts)
        raise AssertionError("an unknown tensor is gathered")


def tensors(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, length, 3), (2, 2, length, 3), (2, 2, length, 5)]
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return query, key, value


ROWS = torch.rand(LENGTH, LENGTH) > 0.3
ROWS.fill_diagonal_(True)
KEYS = torch.tensor([True] * 4 + [False] * 4)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("length", [LENGTH, 7, 5])
@pytest.mark.parametrize("kind", ["plain", "causal", "rows", "whole rows", "keys", "added keys"])
def test_a_shard_attends_as_the_whole_sequence(rank: int, length: int, kind: str) -> None:
    query, key, value = tensors(length)
    rows, keys = ROWS[:length, :length], KEYS[:length]
    added = torch.randn(2, 1, 1, length, dtype=torch.float64)
    whole: dict[str, Any] = {
        "plain": {}, "causal": {"is_causal": True}, "rows": {"attn_mask": rows},
        "whole rows": {"attn_mask": rows[None, None]}, "keys": {"attn_mask": keys[None]},
        "added keys": {"attn_mask": added},
    }[kind]  # fmt: skip
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=0.3, **whole)
    shard = SequenceShard(length, RANKS, rank)
    options = dict(whole)
    if kind == "rows":
        options["attn_mask"] = shard.part(rows, 0)
    elif kind in ("keys", "added keys"):  # divided as other arguments of a block are
        options["attn_mask"] = shard.part(whole["attn_mask"], whole["attn_mask"].dim() - 1)
    both = [key, value, torch.cat((key, value), -1), keys[None].to(torch.uint8), added]
    world: Any = FixedRanks(rank, both, length)
    q, k, v = (shard.part(tensor, 2) for tensor in (query, key, value))
    output = scaled_dot_product_attention(world, shard, q, k, v, enable_gqa=True, scale=0.3, **options)
    assert torch.allclose(output, shard.part(expected, 2), atol=1e-12)


def test_keys_of_another_sequence_are_not_gathered() -> None:
    query, _, _ = tensors()
    memory = torch.randn(2, 4, 7, 3, dtype=torch.float64)
    shard, world = SequenceShard(LENGTH, RANKS, 0), FixedRanks(0, [])
    q = shard.part(query, 2)
    output = scaled_dot_product_attention(world, shard, q, memory, memory)  # type: ignore[arg-type]
    assert torch.equal(output, F.scaled_dot_product_attention(q, memory, memory))


def test_an_attention_mask_of_only_the_shard_is_an_error_with_the_remedy() -> None:
    query, key, value = tensors()
    shard = SequenceShard(LENGTH, RANKS, 0)
    q, k, v = (shard.part(tensor, 2) for tensor in (query, key, value))
    world: Any = FixedRanks(0, [torch.cat((key, value), -1)])
    with pytest.raises(ValueError, match=r"mask of shape \(4, 4\).*compute the mask before the blocks"):
        scaled_dot_product_attention(world, shard, q, k, v, torch.ones(4, 4, dtype=torch.bool), enable_gqa=True)


def test_dropout_differs_between_ranks_and_their_generators_stay_equal() -> None:
    drawn = []
    with torch.random.fork_rng():
        for rank in range(2):
            torch.manual_seed(5)
            with own_stream(World(rank=rank, size=2), torch.empty(1), 0.1):
                inside = torch.rand(3)
            drawn.append((inside, torch.rand(3)))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
