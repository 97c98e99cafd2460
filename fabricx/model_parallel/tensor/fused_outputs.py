"""Operations on the output of a fused projection; a rank has its parts side by side until the user's code splits it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.tensor.feature_dims import Features, Index, indices, permuted, sections, viewed
from fabricx.model_parallel.tensor.feature_trace import CHUNKS, PERMUTES, SPLITS, VIEWS, split_dim
from fabricx.model_parallel.tensor.local_rules import ELEMENTWISE, basic_index
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


def fused_output(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Apply a function to the output of a fused projection without communication.

    Args:
        activations: activations of the group.
        func: function of torch.
        args: its arguments, the output of the projection first.
        options: its named arguments.

    Returns:
        the result; NotImplemented if the function needs the parts in the order of the whole tensor.
    """
    fused: ShardedTensor = args[0]
    dim, parts = fused.sharded_dim, fused.parts
    if func in VIEWS:
        return _view(
            activations, fused, dim, parts, func(torch.empty(fused.shape, device="meta"), *args[1:], **options)
        )
    if func in PERMUTES:
        moved = permuted(Features((), (dim,)), func, [torch.empty(fused.shape, device="meta"), *args[1:]], options)
        return activations.sharded(func(fused.local, *args[1:], **options), moved.dims[0], parts)
    if func in ELEMENTWISE and not any(isinstance(value, Tensor) for value in (*args[1:], *options.values())):
        return activations.sharded(func(fused.local, *args[1:], **options), dim, parts)
    if func is Tensor.__getitem__:
        entries = indices(fused.shape, args[1])
        return NotImplemented if entries is None else _indexed(activations, fused, dim, parts, entries)
    if func is F.glu:
        along = (args[1] if len(args) > 1 else options.get("dim", -1)) % fused.dim()
        halves = along == dim and len(parts) == 2 and parts[0] == parts[1]
        return activations.sharded(F.glu(fused.local, dim), dim) if halves else NotImplemented
    if func in SPLITS or func in CHUNKS:
        return _split(activations, fused, dim, parts, func, args, options)
    return NotImplemented


def _split(
    activations: Activations, fused: ShardedTensor, dim: int, parts: tuple[int, ...], func: Any, args: Sequence[Any],
    options: dict[str, Any],
) -> Any:  # fmt: skip
    if split_dim(func, args, options) != dim:
        pieces = func(fused.local, *args[1:], **options)
        return type(pieces)(activations.sharded(piece, dim, parts) for piece in pieces)
    sizes = [piece.shape[dim] for piece in func(torch.empty(fused.shape, device="meta"), *args[1:], **options)]
    ranges = [_range(activations, fused, dim, parts, *ends) for ends in sections(sum(parts), tuple(sizes))]
    return NotImplemented if any(piece is None for piece in ranges) else tuple(ranges)


def _range(
    activations: Activations, fused: ShardedTensor, dim: int, parts: tuple[int, ...], begin: int, end: int
) -> Any:  # fmt: skip
    """Return a range of whole parts; None if it begins or ends within a part."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    if begin not in ends or end not in ends or begin >= end:
        return None
    ranks = activations.world.size
    taken = parts[ends.index(begin) : ends.index(end)]
    local = fused.local.narrow(dim, begin // ranks, (end - begin) // ranks)
    return activations.sharded(local, dim, taken if len(taken) > 1 else ())


def _indexed(
    activations: Activations, fused: ShardedTensor, dim: int, parts: tuple[int, ...], entries: list[Index]
) -> Any:  # fmt: skip
    [shard] = [entry for entry in entries if entry.dim == dim]
    if shard.drops or shard.step != 1:
        return NotImplemented
    taken = _range(activations, fused, dim, parts, shard.begin, shard.end)
    if taken is None:
        return NotImplemented
    index = [basic_index(entry, entry is shard) for entry in entries]
    moved = sum(not entry.drops for entry in entries[: entries.index(shard)])
    return activations.sharded(taken.local[tuple(index)], moved, taken.parts)


def _view(
    activations: Activations, fused: ShardedTensor, dim: int, parts: tuple[int, ...], target: Tensor
) -> Any:  # fmt: skip
    """Return a view; where each part becomes an element of a dim of its own, the next dim is sharded."""
    after, ranks = viewed(Features((), (dim,)), fused.shape, target.shape), activations.world.size
    if after is None or any(part % ranks for part in parts):
        return NotImplemented
    outer, *inner = after.dims
    shape, size = list(target.shape), math.prod(target.shape[inner_dim] for inner_dim in inner)
    if any(part % size for part in parts) or shape[outer] * size != sum(parts):  # joined with another dim
        return NotImplemented
    units = tuple(part // size for part in parts)
    if all(unit % ranks == 0 for unit in units):
        shape[outer] = sum(units) // ranks
        return activations.sharded(fused.local.reshape(shape), outer, units)
    if set(units) == {1} and inner and shape[inner[0]] % ranks == 0:
        shape[inner[0]] //= ranks
        return activations.sharded(fused.local.reshape(shape), inner[0])
    return NotImplemented
