"""Ranks checkpoints by a monitored metric: which are kept, and whether a value belongs to the present weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, final

from torch import Tensor

Mode = Literal["min", "max"]


def goodness(score: float, mode: Mode) -> float:
    """Return a number that increases with the quality of a score; -infinity for NaN.

    Args:
        score: value of the monitored metric.
        mode: "min" if smaller is better, "max" if larger is better.
    """
    if math.isnan(score):
        return -math.inf
    return score if mode == "max" else -score


def admit(kept: Mapping[str, float], score: float, k: int, mode: Mode) -> tuple[bool, str | None]:
    """Decide whether a checkpoint belongs to the best `k`.

    >>> admit({"a": 0.3, "b": 0.2}, 0.1, k=2, mode="min")
    (True, 'a')
    >>> admit({"a": 0.3, "b": 0.2}, 0.3, k=2, mode="min")
    (False, None)

    Args:
        kept: scores of the present best checkpoints, by path.
        score: score of the new checkpoint.
        k: number of checkpoints to keep; -1 keeps all.
        mode: "min" if smaller is better, "max" if larger is better.

    Returns:
        whether to keep the new checkpoint, and the path of the checkpoint that it displaces, if any.
    """
    if k == 0:
        return False, None
    if k < 0 or len(kept) < k:
        return True, None
    worst = min(kept, key=lambda path: goodness(kept[path], mode))
    if goodness(score, mode) > goodness(kept[worst], mode):
        return True, worst
    return False, None


def best(scores: Mapping[str, float], mode: Mode) -> str:
    """Return the path with the best score, or an empty string; NaN is never the best.

    Args:
        scores: scores by path.
        mode: "min" if smaller is better, "max" if larger is better.
    """
    ranked = {path: score for path, score in scores.items() if not math.isnan(score)}
    return max(ranked, key=lambda path: goodness(ranked[path], mode), default="")


def worst(scores: Mapping[str, float], mode: Mode) -> str:
    """Return the path with the worst score, or an empty string.

    Args:
        scores: scores by path.
        mode: "min" if smaller is better, "max" if larger is better.
    """
    return min(scores, key=lambda path: goodness(scores[path], mode), default="")


@final
class MetricAge:
    """Tells whether the newest value of a metric belongs to the present weights.

    A metric that validations log is as old as the newest validation.

    Attributes:
        validated_step: weight updates at the newest validation; -1 before.
        from_validation: the newest validation has logged the metric.
    """

    def __init__(self) -> None:
        self.validated_step = -1
        self.from_validation = False
        self._before: tuple[Tensor | None] | None = None  # the value at the start of a validation

    def validation_starts(self, value: Tensor | None) -> None:
        """Record the value before a validation.

        Args:
            value: None if the metric was not logged.
        """
        self._before = (value,)

    def validation_ends(self, value: Tensor | None, step: int) -> None:
        """Record a validation.

        Args:
            value: after it; None if the metric was not logged.
            step: weight updates.
        """
        self.validated_step = step
        if self._before is not None:  # otherwise a resumed run has begun this validation
            self.from_validation = value is not None and value is not self._before[0]
            self._before = None

    def forget_validation(self) -> None:
        """Discard a validation that has started and not ended."""
        self._before = None

    def stale(self, step: int) -> bool:
        """Return whether the value belongs to older weights.

        Args:
            step: weight updates.
        """
        return self.from_validation and self.validated_step != step
