"""Running statistics of normalisation, joined over asynchronous workers as if one process had seen all batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World


class Seen(NamedTuple):
    """What a worker knows of one layer: batches before all ranks met last, and since then."""

    before: int
    since: int


def shares(seen: Sequence[Seen], momentum: float | None) -> tuple[int, float, list[float]]:
    """Return how the statistics of one process follow from those of several workers.

    A worker's statistics are q start + (1 - q) mean, with q = (1 - momentum)^k after k batches (before / (before + k),
    where momentum is None). One process would have Q start + (1 - Q) mean, where Q is that of all batches, and its mean
    is that of all batches: of the workers' means, weighted by their batches.

    Args:
        seen: by each worker.
        momentum: of the layer; None for the mean over all batches.

    Returns:
        the worker whose start is taken (that knows most batches), the factor of the start, and those of the workers'
        statistics.

    >>> shares([Seen(0, 1), Seen(0, 3)], None)
    (0, 0.0, [0.25, 0.75])
    >>> shares([Seen(8, 0), Seen(8, 2)], 0.1)  # one worker alone has them already
    (0, 0.0, [0.0, 1.0])
    """
    before = max(one.before for one in seen)
    holder = [one.before for one in seen].index(before)
    count = sum(one.since for one in seen)
    if not count or momentum == 0.0:
        return holder, 1.0, [0.0] * len(seen)

    def kept(before: int, batches: int) -> float:
        whole = before / max(1, before + batches) if momentum is None else (1.0 - momentum) ** batches
        return float(whole)

    left = kept(before, count)
    own = [kept(one.before, one.since) for one in seen]
    factors = [
        (1.0 - left) / (1.0 - q) * (one.since / count) if one.since else 0.0 for one, q in zip(seen, own, strict=True)
    ]
    return holder, left - sum(factor * q for factor, q in zip(factors, own, strict=True)), factors


@final
class RunningStatistics:
    """Those of a module, of which each worker has seen its own batches since all met last.

    Args:
        module: the user's.

    Attributes:
        layers: that have such statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [part for part in module.modules() if _statistics(part) is not None]
        self._computed = 0
        self.remember()

    def remember(self) -> None:
        """Take what they are as what all workers go on from."""
        self._start = [[value.clone() for value in _statistics(layer) or ()] for layer in self.layers]
        self._tracked = [_tracked(layer) for layer in self.layers]
        self._computed = 0

    def computed(self) -> None:
        """Count a batch, for layers that don't."""
        self._computed += 1

    def pool(self, world: World) -> None:
        """Let all workers have what one process would have after all their batches; every worker calls it."""
        if world.size > 1 and self.layers:
            mine = [self._seen(layer, before) for layer, before in zip(self.layers, self._tracked, strict=True)]
            seen = world.gather_objects(mine)
            for number, (layer, start) in enumerate(zip(self.layers, self._start, strict=True)):
                _pool(layer, start, [one[number] for one in seen], world)
        self.remember()

    def _seen(self, layer: nn.Module, before: int) -> Seen:
        counts = getattr(layer, "num_batches_tracked", None) is not None
        counts = counts and not isinstance(layer, nn.modules.instancenorm._InstanceNorm)  # which has one, and leaves it
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
        tracked.fill_(max(one.before for one in seen) + sum(one.since for one in seen))


def _statistics(part: nn.Module) -> tuple[Tensor, Tensor] | None:
    mean, variance = getattr(part, "running_mean", None), getattr(part, "running_var", None)
    if isinstance(mean, Tensor) and isinstance(variance, Tensor) and torch.is_floating_point(mean):
        return mean, variance
    return None


def _tracked(part: nn.Module) -> int:
    tracked = getattr(part, "num_batches_tracked", None)
    return int(tracked) if isinstance(tracked, Tensor) else 0
