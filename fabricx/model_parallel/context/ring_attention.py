"""Ring attention: keys and values pass from rank to rank, so that no rank holds all keys and values of the sequence.

Each rank computes the attention of its queries to the keys that it holds at the moment, while the next keys are on
their way, and combines the results by the logarithms of their sums of exponentials. The backward passes the keys around
again, and their gradients with them.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023, section 3.1 (backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fabricx.distributed.world import World
from fabricx.model_parallel.context.sequence_shard import SequenceShard

SCORES: Final = 2**24  # largest number of attention scores that exist at the same time
HEADS: Final = -3  # dim of heads in [..., heads, length, features of a head]


def ring_attention(
    world: World, shard: SequenceShard, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `F.scaled_dot_product_attention` over the whole sequence, for this rank's queries.

    Args:
        world: ranks along the context axis.
        shard: shard of the sequence.
        query: query of this rank's positions, or of queries without positions, which each rank has; shape [..., heads,
            length, features].
        key: key of this rank's positions.
        value: value of this rank's positions.
        mask: boolean, or added to scores; its last dims are [queries or 1, keys of the whole sequence or 1].
        dropout_p: probability. The random numbers of a pair of ranks follow from a single number of the common stream.
        is_causal: whether each position attends to earlier positions only.
        scale: factor of the scores; None for 1 / sqrt(features).
        enable_gqa: whether several heads of the query share a head of the key.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    heads = query.shape[HEADS] if query.dim() > 2 else 1
    groups = 1
    if enable_gqa and key.shape[HEADS] == value.shape[HEADS]:
        groups = heads // key.shape[HEADS]
    elif enable_gqa:
        key, value = (x.repeat_interleave(heads // x.shape[HEADS], HEADS) for x in (key, value))
    if groups == 1:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (tensor.expand(*batch, *tensor.shape[-2:]) for tensor in (query, key, value))
    grouped = query.unsqueeze(HEADS) if groups == 1 else query.unflatten(HEADS, (heads // groups, groups))
    if mask is not None:
        mask = mask if mask.dim() > 1 else mask.unsqueeze(0)
        by_head = groups > 1 and mask.dim() > 2 and mask.shape[HEADS] == heads
        mask = mask.unflatten(HEADS, (heads // groups, groups)) if by_head else mask.unsqueeze(HEADS)
    positions = shard.pieces if query.shape[-2] == shard.local else ((0, query.shape[-2]),)
    seed = int(torch.randint(2**31, ())) if dropout_p > 0.0 else 0
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    ring = _Ring(world, shard, positions, is_causal, scale, dropout_p, seed)
    output: Tensor = _Attention.apply(ring, grouped, key, value, mask)  # type: ignore[no-untyped-call]
    return output.squeeze(HEADS) if groups == 1 else output.flatten(HEADS - 1, HEADS)


@dataclass(frozen=True)
class _Block:
    """Scores that are computed together.

    Attributes:
        rows: queries of this rank.
        columns: keys of the rank that they came from.
        first: position of the first of these keys in the whole sequence.
        diagonal: largest column minus row with a causal score, as in `torch.tril`; None without a causal mask.
    """

    rows: slice
    columns: slice
    first: int
    diagonal: int | None


@dataclass(frozen=True)
class _Ring:
    """Options of an attention.

    Attributes:
        world, shard: see `ring_attention`.
        queries: (begin, end) of the positions of pieces of the queries.
        causal, scale, dropout, seed: see `ring_attention`.
    """

    world: World
    shard: SequenceShard
    queries: Sequence[tuple[int, int]]
    causal: bool
    scale: float
    dropout: float
    seed: int

    def around(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield the tensors of each rank, with the rank; the next tensors arrive in the meantime.

        Args:
            tensors: keys and values of this rank, contiguous.
        """
        world, held = self.world, tensors
        for step in range(world.size):
            arriving: tuple[Tensor, ...] = ()
            if step + 1 < world.size:
                arriving = tuple(torch.empty_like(tensor) for tensor in held)
                works = [world.begin_shift(sent, room, 1) for sent, room in zip(held, arriving, strict=True)]
            yield (world.rank - step) % world.size, held
            for work in works if arriving else ():
                world.end_shift(work)
            held = arriving

    def blocks(self, source: int, row: int) -> Iterator[_Block]:
        """Yield the blocks of scores of this rank's queries and the keys of a rank, without those that are all masked.

        Args:
            source: rank of the keys.
            row: number of scores of a query and a key, in all samples and heads.
        """
        size = self.shard.piece
        starts = [number * size for number in (source, 2 * self.shard.ranks - 1 - source)]
        begin = 0
        for first, end in self.queries:
            for number, start in enumerate(starts):
                keys = min(size, self.shard.length - start)  # without repeats
                if keys <= 0 or (self.causal and start >= end):
                    continue
                count = max(1, SCORES // (row * keys))
                for step in range(0, end - first, count):
                    rows = slice(begin + step, begin + min(step + count, end - first))
                    columns = slice(number * size, number * size + keys)
                    diagonal = first + step - start
                    yield _Block(rows, columns, start, diagonal if self.causal and diagonal < keys - 1 else None)
            begin += end - first

    def scores(self, query: Tensor, keys: Tensor, mask: Tensor | None, block: _Block) -> Tensor:
        """Return the masked scores of a block, shape [..., groups, rows, columns].

        Args:
            query: queries of this rank, shape [..., groups, length, features].
            keys: keys of a rank, shape [..., length, features].
            mask: see `ring_attention`, with a dim of groups.
            block: part of both.
        """
        rows = query[..., block.rows, :]
        products = rows.flatten(-3, -2).to(keys.dtype) @ keys[..., block.columns, :].mT
        scores: Tensor = products.mul_(self.scale).unflatten(-2, rows.shape[-3:-1])
        if block.diagonal is not None:
            earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(block.diagonal)
            scores = scores.masked_fill_(~earlier, -math.inf)
        if mask is None:
            return scores
        part = mask[_part_of(mask, block)]
        return scores.masked_fill(~part, -math.inf) if mask.dtype is torch.bool else scores + part

    def generator(self, source: int, device: torch.device) -> torch.Generator:
        """Return the source of the random numbers of dropout, for this rank's queries and the keys of a rank.

        Args:
            source: rank of the keys.
            device: device of the numbers.
        """
        pair = self.world.rank * self.world.size + source
        return torch.Generator(device).manual_seed(self.seed + pair)

    def kept(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Return the factors of attention weights by dropout.

        Args:
            weights: attention weights of a block.
            generator: result of `generator`, for the blocks in their order.
        """
        kept: Tensor = torch.empty_like(weights).bernoulli_(1 - self.dropout, generator=generator)
        return kept if self.dropout == 1 else kept.div_(1 - self.dropout)


@final
class _Attention(torch.autograd.Function):
    """Attention of queries [..., heads, groups, length, features] to keys and values [..., heads, length, features]."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        total = query.new_full((*query.shape[:-1], 1), -math.inf, dtype=wide)  # logarithm of the sum of exponentials
        with torch.autocast(query.device.type, enabled=False):
            for source, tensors in ring.around(key, value):
                (keys, values), generator = (held.to(wide) for held in tensors), ring.generator(source, query.device)
                for block in ring.blocks(source, query[..., 0, 0].numel()):
                    scores = ring.scores(query, keys, mask, block)
                    before = total[..., block.rows, :]
                    after = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
                    finite = _finite(after)
                    weights = scores.sub_(finite).exp_()
                    if ring.dropout > 0.0:
                        weights = weights.mul_(ring.kept(weights, generator))
                    added = weights.flatten(-3, -2) @ values[..., block.columns, :]
                    earlier = output[..., block.rows, :] * (before - finite).exp()
                    output[..., block.rows, :] = earlier + added.unflatten(-2, weights.shape[-3:-1])
                    total[..., block.rows, :] = after
        narrow = output.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, mask, narrow, total)
        return narrow

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ring: _Ring = ctx.ring
        query, key, value, mask, output, total = ctx.saved_tensors
        wide = total.dtype
        gradient = gradients[0].to(wide)
        row_sums = (gradient * output).sum(-1, keepdim=True)  # the part of the softmax that all keys share
        total = _finite(total)
        by_query = torch.zeros_like(query, dtype=wide)
        by_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and ctx.needs_input_grad[4] else None
        passed: list[tuple[Any, Tensor, Tensor]] = []  # gradients that are on their way, with their sources
        with torch.autocast(query.device.type, enabled=False):
            for source, tensors in ring.around(key, value):
                (keys, values), generator = (held.to(wide) for held in tensors), ring.generator(source, query.device)
                by_key, by_value = torch.zeros_like(keys), torch.zeros_like(values)
                for block in ring.blocks(source, query[..., 0, 0].numel()):
                    rows, columns = block.rows, block.columns
                    weights = ring.scores(query, keys, mask, block).sub_(total[..., rows, :]).exp_()
                    kept = ring.kept(weights, generator) if ring.dropout > 0.0 else None
                    dropped = weights if kept is None else weights * kept
                    part = gradient[..., rows, :].flatten(-3, -2)
                    by_value[..., columns, :] += dropped.flatten(-3, -2).mT @ part
                    by_weight = (part @ values[..., columns, :].mT).unflatten(-2, weights.shape[-3:-1])
                    by_weight = by_weight if kept is None else by_weight.mul_(kept)
                    by_score = weights.mul_(by_weight.sub_(row_sums[..., rows, :]))
                    if by_mask is not None:
                        region = _part_of(by_mask, block)
                        by_mask[region] += by_score.sum_to_size(by_mask[region].shape)
                    scaled = by_score.mul_(ring.scale).flatten(-3, -2)
                    product = scaled @ keys[..., columns, :]
                    by_query[..., rows, :] += product.unflatten(-2, weights.shape[-3:-1])
                    by_key[..., columns, :] += scaled.mT @ query[..., rows, :].flatten(-3, -2).to(wide)
                arrived = _arrived(ring.world, passed)
                passed = []
                for number, gradient_part in enumerate((by_key, by_value)):
                    sent = (gradient_part + arrived[number] if arrived else gradient_part).to(key.dtype)
                    room = torch.empty_like(sent)
                    passed.append((ring.world.begin_shift(sent, room, 1), room, sent))
            own_key, own_value = _arrived(ring.world, passed)
        found_mask = None if mask is None or by_mask is None else by_mask.to(mask.dtype)
        return None, by_query.to(query.dtype), own_key, own_value, found_mask


def _finite(total: Tensor) -> Tensor:
    """Return logarithms of sums, with 0 for queries whose keys are all masked, whose weights are then 0."""
    return total.masked_fill(total == -math.inf, 0.0)


def _part_of(mask: Tensor, block: _Block) -> tuple[Any, ...]:
    """Return the index of a block in a mask, whose rows and columns may be a single one for all."""
    count = block.columns.stop - block.columns.start
    rows = block.rows if mask.shape[-2] > 1 else slice(None)
    return ..., rows, slice(block.first, block.first + count) if mask.shape[-1] > 1 else slice(None)


def _arrived(world: World, passed: Sequence[tuple[Any, Tensor, Tensor]]) -> list[Tensor]:
    """Return the tensors that the previous rank has passed."""
    for works, _, _ in passed:
        world.end_shift(works)
    return [room for _, room, _ in passed]
