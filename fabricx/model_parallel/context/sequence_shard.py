"""Shards of a sequence: each rank has a piece from its front and one from its back, which balances causal attention.

Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fabricx.distributed.world import World


@dataclass(frozen=True)
class SequenceShard:
    """The shard of a rank: pieces `rank` and `2 * ranks - 1 - rank` of `2 * ranks` equal pieces.

    If the length is not divisible, the pieces end with repeats of the last position of the sequence. Nothing
    reads the results of repeats: gathers remove them, and their gradient is 0. Ranks thus compute tensors of equal
    shapes.

    Attributes:
        length: length of the whole sequence.
        ranks: number of shards.
        rank: rank of this shard.
        device: device of the positions.
        piece: positions of a piece; 0 for the smallest size.
        positions: positions in the whole sequence, of the elements of this shard; shape [2 * piece].
        order: index of each position of the whole sequence in the shards of all ranks, one after another.
        filled: number of elements before the repeats.

    Raises:
        ValueError: the sequence has fewer positions than pieces.

    >>> shard = SequenceShard(8, 2, 0)
    >>> shard.positions.tolist(), shard.order.tolist(), shard.pieces
    ([0, 1, 6, 7], [0, 1, 4, 5, 6, 7, 2, 3], ((0, 2), (6, 8)))
    >>> shard = SequenceShard(7, 2, 0)
    >>> shard.positions.tolist(), shard.filled
    ([0, 1, 6, 6], 3)
    """

    length: int
    ranks: int
    rank: int
    device: torch.device | str = "cpu"
    piece: int = 0
    positions: Tensor = field(init=False, repr=False, compare=False)
    order: Tensor = field(init=False, repr=False, compare=False)
    filled: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.length < 2 * self.ranks:
            raise ValueError(
                f"context={self.ranks} divides a sequence into {2 * self.ranks} pieces, and its length is "
                f"{self.length}: use longer samples or a smaller context"
            )
        piece = max(self.piece, -(-self.length // (2 * self.ranks)))
        pieces = torch.arange(2 * self.ranks * piece).view(2 * self.ranks, -1)
        shards = [pieces[[rank, 2 * self.ranks - 1 - rank]].flatten() for rank in range(self.ranks)]
        indices = shards[self.rank]
        values = {
            "piece": piece,
            "positions": indices.clamp(max=self.length - 1).to(self.device),
            "order": torch.cat(shards).argsort()[: self.length].to(self.device),
            "filled": int((indices < self.length).sum()),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def local(self) -> int:
        """Return the number of positions of this shard, with repeats."""
        return 2 * self.piece

    @property
    def pieces(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (begin, end) of the two pieces of this shard in the whole sequence, and of repeats after its end."""
        front, back = self.rank * self.piece, (2 * self.ranks - 1 - self.rank) * self.piece
        return (front, front + self.piece), (back, back + self.piece)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor.

        Args:
            whole: whole tensor with the whole sequence in `dim`.
            dim: dimension of the sequence.
        """
        return whole.index_select(dim, self.positions)

    def ordered(self, shards: Tensor, dim: int) -> Tensor:
        """Return the whole sequence in its order.

        Args:
            shards: shards of all ranks, shape [ranks, ...].
            dim: dimension of the sequence in a shard, 0 or more.
        """
        return torch.cat(tuple(shards), dim).index_select(dim, self.order)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, local: Tensor, world: World, shard: SequenceShard, dim: int) -> Tensor:
        ctx.shard, ctx.dim = shard, dim  # type: ignore[attr-defined]
        return shard.ordered(world.all_gather(local.contiguous()), dim)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shard: SequenceShard = ctx.shard  # type: ignore[attr-defined]
        dim: int = ctx.dim  # type: ignore[attr-defined]
        gradient = shard.part(gradients[0], dim) * shard.ranks
        gradient.narrow(dim, shard.filled, shard.local - shard.filled).zero_()
        return gradient, None, None, None


def joined(local: Tensor, world: World, shard: SequenceShard, dim: int) -> Tensor:
    """Return the whole tensor, with which every rank computes the same afterwards.

    Gradients of parameters are averaged over the ranks. For computations after this function, which every rank
    repeats, the mean is the gradient. For computations on shards before it, the gradient is the sum over the ranks: the
    backward multiplies this rank's part by the number of ranks.

    Args:
        local: this rank's part.
        world: ranks along the context axis.
        shard: shard of the sequence.
        dim: dimension of the sequence, 0 or more.
    """
    whole: Tensor = _Joined.apply(local, world, shard, dim)  # type: ignore[no-untyped-call]
    return whole


def gathered(local: Tensor, world: World, shard: SequenceShard, dim: int) -> Tensor:
    """Return the whole tensor, with which each rank computes something else; the backward sums over the ranks.

    Args:
        local: this rank's part.
        world: ranks along the context axis.
        shard: shard of the sequence.
        dim: dimension of the sequence, 0 or more.
    """
    return shard.ordered(world.all_gather(local.contiguous(), sync_grads=True), dim)
