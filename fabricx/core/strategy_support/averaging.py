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
    """Decay and schedule of an exponential moving average.

    Attributes:
        decay: weight of the old average in each step of the average, from 0 to 1.
        every: weight updates between two steps of the average, at least 1.
        start: number of first weight updates during which the average is a copy of the weights.
    """

    decay: float
    every: int = 1
    start: int = 0

    @torch.no_grad()
    def follow(self, averages: Sequence[Tensor], weights: Sequence[Tensor], before: int, step: int) -> int:
        """Update averages in place.

        Args:
            averages: averages in float32 or float64.
            weights: weights of the same shapes, in any precision.
            before: number of the newest update in the averages.
            step: number of the newest update in the weights. After several updates, the decay is raised to the power
                of the steps in between.

        Returns:
            steps of the average; 0 if none was due, or the weights were copied.
        """
        if step <= self.start:
            if averages:
                torch._foreach_copy_(list(averages), list(weights))
            return 0
        times = step // self.every - max(before, self.start) // self.every
        if times and averages:
            same = [tensor.to(average.dtype) for tensor, average in zip(weights, averages, strict=True)]
            torch._foreach_lerp_(list(averages), same, 1.0 - self.decay**times)
        return times


@final
class FlatAverage:
    """Moving average of a server's part of the weights, which the server updates at each weight update.

    Args:
        rule: update rule of the average.
        step: weight updates of the run so far.
        version: weight updates that the server has counted so far.
        values: present average, shape [elements].
        updates: steps of the present average.

    Attributes:
        updates: steps of the average.
    """

    def __init__(self, rule: AverageRule, step: int, version: int, values: Tensor, updates: int = 0) -> None:
        self._rule, self._step, self._offset = rule, step, step - version
        self.values = values
        self.updates = updates

    def follow(self, weights: Tensor, version: int) -> None:
        """Update the average.

        Args:
            weights: after an update, shape [elements].
            version: weight updates that the server has counted.
        """
        step = version + self._offset
        self.updates += self._rule.follow([self.values], [weights], self._step, step)
        self._step = step
