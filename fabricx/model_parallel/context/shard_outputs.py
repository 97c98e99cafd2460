"""Outputs of submodules in shards of the sequence, for the comparison with the whole sequence in a trial."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.model_parallel.trial import Record, fingerprint


@final
class ShardOutputs:
    """Fingerprints of outputs of the whole sequence and of shards; the sum over the ranks is the whole fingerprint.

    No rank waits for another rank while the step runs: which submodules run, and for how many positions, may depend on
    the data of a shard, as in a mixture of experts. Outputs of such submodules are not compared.

    Args:
        world: ranks along the context axis.
        shard: returns the shard that is computed; None outside of the blocks.
        ordinary: returns an activation as an ordinary tensor.
    """

    def __init__(
        self, world: World, shard: Callable[[], SequenceShard | None], ordinary: Callable[[Any], Any]
    ) -> None:  # fmt: skip
        self._world, self._shard, self._ordinary = world, shard, ordinary
        self._whole: dict[str, list[torch.Size]] = {}  # shapes of outputs of the whole sequence, by submodule
        self._kinds: dict[str, list[str]] = {}  # of outputs of this rank: "whole", "part" or "other"

    def of_whole(self, name: str, output: Any) -> list[float]:
        """Return the fingerprint of an output of the whole sequence.

        Args:
            name: submodule.
            output: its output, a tensor.
        """
        ordinary: Tensor = self._ordinary(output)
        self._whole.setdefault(name, []).append(ordinary.shape)
        return fingerprint(ordinary)

    def of_shard(self, name: str, output: Any) -> list[float]:
        """Return the fingerprint of an output of this rank; of a part of the whole sequence, its share in the sum.

        Args:
            name: submodule.
            output: its output, a tensor.
        """
        ordinary: Tensor = self._ordinary(output)
        kinds, shapes = self._kinds.setdefault(name, []), self._whole.get(name, [])
        shape = shapes[len(kinds)] if len(kinds) < len(shapes) else torch.Size()
        shard, dim = self._shard(), self._divided_dim(ordinary.shape, shape)
        kinds.append("whole" if ordinary.shape == shape else "other" if dim is None else "part")
        if shard is None or dim is None:
            return fingerprint(ordinary)
        index = torch.arange(shape.numel(), device=ordinary.device).view(shape)
        return fingerprint(ordinary.narrow(dim, 0, shard.filled), shard.part(index, dim).narrow(dim, 0, shard.filled))

    def _divided_dim(self, part: torch.Size, whole: torch.Size) -> int | None:
        """Return the dim along which an output is the part of a whole output; None if it is not such a part."""
        shard = self._shard()
        if shard is None or len(part) != len(whole):
            return None
        sizes = [(dim, *pair) for dim, pair in enumerate(zip(part, whole, strict=True)) if pair[0] != pair[1]]
        return sizes[0][0] if [pair for _, *pair in sizes] == [[shard.local, shard.length]] else None

    def combine(self, before: Record, after: Record) -> None:
        """Complete the record of the shards, and remove outputs that can't be compared from both; all ranks call it.

        Args:
            before: record of the whole sequence.
            after: record of this rank's shards.
        """
        ranks = self._world.gather_objects((self._kinds, after.outputs))
        kinds = [kinds_of_rank for kinds_of_rank, _ in ranks]
        comparable = {
            name
            for name, shapes in self._whole.items()
            if all(of_rank.get(name) == kinds[0].get(name) for of_rank in kinds)
            and len(kinds[0].get(name, ())) == len(shapes)
            and "other" not in kinds[0][name]
        }
        before.outputs = [entry for entry in before.outputs if entry[0] in comparable]
        of_ranks = [[entry for entry in outputs if entry[0] in comparable] for _, outputs in ranks]
        calls = dict.fromkeys(comparable, 0)
        after.outputs = []
        for number, (name, values) in enumerate(of_ranks[self._world.rank]):
            divided = kinds[0][name][calls[name]] == "part"
            calls[name] += 1
            whole = _summed([outputs[number][1] for outputs in of_ranks]) if divided else values
            after.outputs.append((name, whole))


def _summed(parts: list[list[float]]) -> list[float]:
    """Return the fingerprint of a tensor from the fingerprints of its parts."""
    norms, *projections = zip(*parts, strict=True)
    return [math.hypot(*norms), *(math.fsum(values) for values in projections)]
