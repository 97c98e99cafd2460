"""Update rule of an exponential moving average of weights, for callbacks and servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class AverageRule:
    """How an exponential moving average follows weights.

    Attributes:
        decay: share of the average that stays at each step of it, from 0 to 1.
        every: weight updates between two steps of the average, at least 1.
        start: until this many weight updates the average is a copy of the weights.
    """

    decay: float
    every: int = 1
    start: int = 0

    @torch.no_grad()
    def follow(self, averages: Sequence[Tensor], weights: Sequence[Tensor], before: int, step: int) -> int:
        """Take the weights of an update into averages, in place.

        Args:
            averages: in float32 or float64.
            weights: of the same shapes, in any precision.
            before: number of the update that the averages have seen last.
            step: number of the update that the weights are of. If it is several updates later, the decay is taken to
                the power of the steps in between.

        Returns:
            steps of the average; 0 if none was due, or the weights were copied.
        """
        times = step // self.every - before // self.every
        if not times:
            return 0
        if step <= self.start:
            times = 0
            if averages:
                torch._foreach_copy_(list(averages), list(weights))
        elif averages:
            same = [tensor.to(average.dtype) for tensor, average in zip(weights, averages, strict=True)]
            torch._foreach_lerp_(list(averages), same, 1.0 - self.decay**times)
        return times


@final
class FlatAverage:
    """The average that a server keeps of its part of the weights: it sees those of each update.

    Args:
        rule: how it follows the weights.
        step: weight updates of the run so far.
        version: weight updates that the server has counted so far.
        values: the average as it is now, flat.

    Attributes:
        updates: steps of the average since then.
    """

    def __init__(self, rule: AverageRule, step: int, version: int, values: Tensor) -> None:
        self._rule, self._step, self._offset = rule, step, step - version
        self.values = values
        self.updates = 0

    def follow(self, weights: Tensor, version: int) -> None:
        """Take the weights after an update into the average; `version` counts updates as the server does."""
        step = version + self._offset
        self.updates += self._rule.follow([self.values], [weights], self._step, step)
        self._step = step
