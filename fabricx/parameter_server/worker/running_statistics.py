"""Pools running statistics of asynchronous workers, as if a single process had processed all batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World


class Seen(NamedTuple):
    """Batch counts of a layer on a worker: before all ranks last met, and since then."""

    before: int
    since: int


def shares(seen: Sequence[Seen], momentum: float | None) -> tuple[int, float, list[float]]:
    """Return coefficients that combine the statistics of several workers to the statistics of a single process.

    After k batches, a worker's statistics are q start + (1 - q) mean, with q = (1 - momentum)^k (before / (before + k)
    if momentum is None). A single process would have Q start + (1 - Q) mean, where Q is that of all batches, and the
    mean is the workers' means weighted by their batches.

    Args:
        seen: batch counts of each worker.
        momentum: momentum of the layer; None for a cumulative mean.

    Returns:
        Worker whose start is used (with the most batches), coefficient of the start, and coefficients of the workers'
        statistics.

    >>> shares([Seen(0, 1), Seen(0, 3)], None)
    (0, 0.0, [0.25, 0.75])
    >>> shares([Seen(8, 0), Seen(8, 2)], 0.1)  # a single worker had batches
    (0, 0.0, [0.0, 1.0])
    """
    before = max(counts.before for counts in seen)
    holder = [counts.before for counts in seen].index(before)
    count = sum(counts.since for counts in seen)
    if not count or momentum == 0.0:
        return holder, 1.0, [0.0] * len(seen)

    def kept(before: int, batches: int) -> float:
        whole = before / max(1, before + batches) if momentum is None else (1.0 - momentum) ** batches
        return float(whole)

    start_all = kept(before, count)
    starts = [kept(counts.before, counts.since) for counts in seen]
    factors = [
        (1.0 - start_all) / (1.0 - q) * (counts.since / count) if counts.since else 0.0
        for counts, q in zip(seen, starts, strict=True)
    ]
    return holder, start_all - sum(factor * q for factor, q in zip(factors, starts, strict=True)), factors


@final
class RunningStatistics:
    """Running statistics of a module; the workers have processed different batches since they last met.

    Args:
        module: the user's module.

    Attributes:
        layers: layers with running statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.layers = [part for part in module.modules() if _statistics(part) is not None]
        self._computed = self._marked = 0
        self.remember()

    def remember(self) -> None:
        """Save the present statistics as the common start of all workers."""
        self._start = [[value.clone() for value in _statistics(layer) or ()] for layer in self.layers]
        self._tracked = [_tracked(layer) for layer in self.layers]
        self._computed = self._marked = 0

    def computed(self) -> None:
        """Count a batch, for layers that do not count batches."""
        self._computed += 1

    def mark(self) -> None:
        """Save the number of batches."""
        self._marked = self._computed

    def rewind(self) -> None:
        """Restore the number of batches of `mark`, because later batches will be trained again."""
        self._computed = self._marked

    def pool(self, world: World) -> None:
        """Set the statistics to the values of a single process with all workers' batches; every worker calls it.

        Other buffers are copied from the worker with the most batches since all workers last met: a slow worker may
        have trained no batch.

        Args:
            world: the workers.
        """
        others = self._other_buffers()
        if world.size > 1 and (self.layers or others):
            local = [self._seen(layer, before) for layer, before in zip(self.layers, self._tracked, strict=True)]
            batches, seen = zip(*world.gather_objects((self._computed, local)), strict=True)
            for number, (layer, start) in enumerate(zip(self.layers, self._start, strict=True)):
                _pool(layer, start, [counts[number] for counts in seen], world)
            for buffer in others:
                world.broadcast(buffer, batches.index(max(batches)))
        self.remember()

    def _other_buffers(self) -> list[Tensor]:
        """Return the buffers of the module that are no running statistics."""
        pooled = [(*(_statistics(layer) or ()), getattr(layer, "num_batches_tracked", None)) for layer in self.layers]
        statistics = {id(buffer) for buffers in pooled for buffer in buffers}
        return [buffer for buffer in self._module.buffers() if id(buffer) not in statistics]

    def _seen(self, layer: nn.Module, before: int) -> Seen:
        counts = getattr(layer, "num_batches_tracked", None) is not None
        counts = counts and not isinstance(layer, nn.modules.instancenorm._InstanceNorm)  # its counter never changes
        return Seen(before, _tracked(layer) - before if counts else self._computed)


def _pool(layer: nn.Module, start: Sequence[Tensor], seen: Sequence[Seen], world: World) -> None:
    holder, of_start, factors = shares(seen, getattr(layer, "momentum", 1.0))
    for value, before in zip(_statistics(layer) or (), start, strict=True):
        part = value * factors[world.rank]
        if world.rank == holder and of_start:
            part += before * of_start
        value.copy_(world.all_reduce(part))
    tracked = getattr(layer, "num_batches_tracked", None)
    if isinstance(tracked, Tensor):
        tracked.fill_(max(counts.before for counts in seen) + sum(counts.since for counts in seen))


def _statistics(part: nn.Module) -> tuple[Tensor, Tensor] | None:
    mean, variance = getattr(part, "running_mean", None), getattr(part, "running_var", None)
    if isinstance(mean, Tensor) and isinstance(variance, Tensor) and torch.is_floating_point(mean):
        return mean, variance
    return None


def _tracked(part: nn.Module) -> int:
    tracked = getattr(part, "num_batches_tracked", None)
    return int(tracked) if isinstance(tracked, Tensor) else 0
