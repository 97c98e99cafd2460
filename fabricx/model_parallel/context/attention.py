"""Attention of the queries of a rank's shard to the keys of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.distributed.world import World
from fabricx.model_parallel.context.ring_attention import ring_attention
from fabricx.model_parallel.context.sequence_shard import SequenceShard, gathered

LENGTH: Final = -2  # dim of positions in [..., heads, length, features of a head]


def scaled_dot_product_attention(
    world: World, shard: SequenceShard, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, ring: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Compute `F.scaled_dot_product_attention` over the whole sequence, for this rank's queries.

    Keys and values of all ranks are gathered, and the backward sums their gradients; or they pass from rank to rank.
    Causal attention computes two pieces of queries, each with the keys before its end only, so that all ranks have the
    same amount of work.

    Args:
        world: ranks along the context axis.
        shard: shard of the sequence.
        query: query of this rank's positions, shape [..., heads, length, features].
        key: key of this rank's positions. Keys of a different length belong to a second sequence, which is whole on
            each rank (cross-attention).
        value: see `key`.
        attn_mask: [..., this rank's positions or 1, keys of the whole sequence or 1]; with one row also keys of this
            rank's positions; or of the whole sequence.
        dropout_p: probability. Each rank draws from a separate random stream, so that the common stream is equal on all
            ranks.
        is_causal, options: of torch's function.
        ring: keys and values pass from rank to rank.

    Raises:
        ValueError: the mask has an unsupported shape.
    """
    if key.shape[LENGTH] != shard.local:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None:
        attn_mask = _mask(world, shard, attn_mask)
    if ring:
        return ring_attention(world, shard, query, key, value, attn_mask, dropout_p, is_causal, **options)
    key, value = _whole_keys(world, shard, key, value)
    with own_stream(world, query, dropout_p):
        if not is_causal or query.shape[LENGTH] != shard.local:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        outputs = []
        for piece, (begin, end) in zip(query.chunk(2, LENGTH), shard.pieces, strict=True):
            count = min(end, shard.length)  # without repeats
            keys, values = key.narrow(LENGTH, 0, count), value.narrow(LENGTH, 0, count)
            earlier = None if begin == 0 else _causal(end - begin, count, begin, query.device)
            outputs.append(
                F.scaled_dot_product_attention(piece, keys, values, earlier, dropout_p, begin == 0, **options)
            )
        return torch.cat(outputs, LENGTH)


def _whole_keys(world: World, shard: SequenceShard, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values, in one collective if their shapes are alike."""
    dim = key.dim() + LENGTH
    if key.shape[:-1] == value.shape[:-1] and key.dtype == value.dtype:
        both = gathered(torch.cat((key, value), -1), world, shard, dim)
        whole = both.split((key.shape[-1], value.shape[-1]), -1)
        return whole[0], whole[1]
    return gathered(key, world, shard, dim), gathered(value, world, shard, value.dim() + LENGTH)


def _causal(queries: int, keys: int, begin: int, device: torch.device) -> Tensor:
    """Return a mask for queries from the position `begin` on."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(begin)


def _mask(world: World, shard: SequenceShard, mask: Tensor) -> Tensor:
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
    if rows == 1 and columns == shard.local:  # a mask of keys, such as padding, was divided like other arguments
        return whole_mask(world, shard, mask)
    if rows == columns == shard.length:  # whole, since no mask was among the arguments of a block in the trial
        return shard.part(mask, mask.dim() + LENGTH)
    if rows not in (1, shard.local) or columns not in (1, shard.length):
        raise ValueError(
            f"attention with a mask of shape {tuple(mask.shape)} in a shard of {shard.local} positions of a sequence "
            f"of {shard.length}: under context parallelism compute the mask before the blocks and pass it to them as "
            "an argument of shape [..., length, length], register it as a buffer that attention slices, or use "
            "is_causal=True. If blocks of a library compute it, such as T5, use strategy=tensor or strategy=pipeline"
        )
    return mask


def whole_mask(world: World, shard: SequenceShard, mask: Tensor) -> Tensor:
    """Return a mask of the keys of all ranks.

    Args:
        world: ranks along the context axis.
        shard: shard of the sequence.
        mask: mask of this rank's keys, in the last dim.
    """
    if mask.dtype is not torch.bool:
        return gathered(mask, world, shard, mask.dim() - 1)
    return gathered(mask.to(torch.uint8), world, shard, mask.dim() - 1).bool()  # gloo has no bool


@contextmanager
def own_stream(world: World, like: Tensor, dropout: float) -> Iterator[None]:
    """Context in which each rank draws other random numbers; afterwards all ranks have drawn the same.

    Args:
        world: ranks along the context axis.
        like: tensor on the device of the random numbers.
        dropout: probability; with 0 nothing changes.
    """
    if dropout == 0:
        yield
        return
    seed = int(torch.randint(2**31, ()))
    devices = [] if like.device.type == "cpu" else [like.device]
    kind: Any = {"device_type": like.device.type} if devices else {}
    with torch.random.fork_rng(devices=devices, **kind):
        torch.manual_seed(seed + world.rank)
        yield
