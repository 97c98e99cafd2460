"""Rows of a whole parameter that each rank of a tensor-parallel group stores, also for fused projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a shard, which are consecutive in the whole tensor, too; rows are counted along one dim.

    Attributes:
        local: first row in the shard.
        whole: first row in the whole tensor.
        rows: number of rows.
    """

    local: int
    whole: int
    rows: int


@final
@dataclass(frozen=True)
class Placement:
    """A tensor that is sharded along one dim over the ranks of a tensor-parallel group.

    A fused projection computes several parts, such as q, k and v. Each part is sharded on its own, so that a rank has
    its share of each part: its shard has several blocks.

    Attributes:
        shape: shape of the whole tensor.
        dim: dimension that is sharded.
        parts: sizes of the parts along `dim`; their sum is `shape[dim]`.
        ranks: number of ranks.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[int, ...]
    ranks: int

    def blocks(self, rank: int, begin: int = 0, end: int | None = None) -> list[Block]:
        """Return the blocks of a rank's shard, or of rows begin:end of this shard (sharded again along the same dim).

        Args:
            rank: rank in the tensor-parallel group.
            begin: first row of the shard.
            end: row after the last; None for the end of the shard.

        >>> Placement((12, 4), 0, (4, 4, 4), 2).blocks(1)
        [Block(local=0, whole=2, rows=2), Block(local=2, whole=6, rows=2), Block(local=4, whole=10, rows=2)]
        >>> Placement((12, 4), 0, (4, 4, 4), 2).blocks(1, 3, 6)
        [Block(local=0, whole=7, rows=1), Block(local=1, whole=10, rows=2)]
        """
        blocks, local, whole = [], 0, 0
        for part in self.parts:
            first, last = share(part, rank, self.ranks)
            low = max(begin, local)
            high = local + last - first if end is None else min(end, local + last - first)
            if low < high:
                blocks.append(Block(low - begin, whole + first + low - local, high - low))
            local, whole = local + last - first, whole + part
        return blocks

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard.

        Args:
            rank: rank in the tensor-parallel group.
        """
        rows = sum(block.rows for block in self.blocks(rank))
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of a rank's shard of a whole tensor.

        Args:
            whole: whole tensor of shape `shape`.
            rank: rank in the tensor-parallel group.
        """
        rows = [whole.narrow(self.dim, block.whole, block.rows) for block in self.blocks(rank)]
        return torch.cat(rows, self.dim) if rows else whole.new_empty(whole.narrow(self.dim, 0, 0).shape)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor.

        Args:
            shards: shards of all ranks, in order.
        """
        whole = shards[0].new_empty(self.shape)
        for rank, shard in enumerate(shards):
            for block in self.blocks(rank):
                rows = shard.narrow(self.dim, block.local, block.rows)
                whole.narrow(self.dim, block.whole, block.rows).copy_(rows)
        return whole

    def slices(self, rank: int, begin: int = 0, end: int | None = None) -> list[tuple[Region, Region]]:
        """Return pairs of equal regions: in a part of the shard, and in the whole tensor.

        Args:
            rank: rank in the tensor-parallel group.
            begin: first row of the part along dim 0, in which fsdp shards again.
            end: row after its last; None for the end of the shard.

        >>> Placement((4, 6), 1, (6,), 2).slices(1, 2, 4)
        [((slice(0, 2, None), slice(0, 3, None)), (slice(2, 4, None), slice(3, 6, None)))]
        """
        rows = self.local_shape(rank)[0]
        begin, end = min(begin, rows), rows if end is None else min(end, rows)
        if end == begin:
            return []
        pairs: list[tuple[Region, Region]] = []
        for block in self.blocks(rank, begin, end) if self.dim == 0 else self.blocks(rank):
            local = [slice(0, size) for size in self.shape]
            whole = list(local)
            local[0], whole[0] = slice(0, end - begin), slice(begin, end)
            local[self.dim] = slice(block.local, block.local + block.rows)
            whole[self.dim] = slice(block.whole, block.whole + block.rows)
            pairs.append((tuple(local), tuple(whole)))
        return pairs


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data, also of another shape.

    The node of autograd that accumulates its gradient has the former shape, and lives as long as a graph of the
    parameter, such as that of a loss in an attribute of the module. torch removes it if the dtype changes.

    Args:
        parameter: of a module, or a buffer.
        data: of the same dtype.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> kept = weight.sum()
    >>> replace_data(weight, torch.ones(2))
    >>> weight.sum().backward()
    >>> weight.grad.tolist()
    [1.0, 1.0]
    """
    if parameter.requires_grad and parameter.shape != data.shape:
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data


def share(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row and the row after the last of a rank; the last ranks have fewer rows, as in `torch.chunk`.

    Args:
        rows: rows to divide.
        rank: rank of `ranks`.
        ranks: number of ranks.

    >>> [share(67, rank, 4) for rank in range(4)]
    [(0, 17), (17, 34), (34, 51), (51, 67)]
    """
    entry = math.ceil(rows / ranks)
    return min(rank * entry, rows), min((rank + 1) * entry, rows)
