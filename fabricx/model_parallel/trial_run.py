"""Comparison of a module before and after it is divided: loss and gradient norm of two samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fabricx.core.hook_calls.loss import loss_of
from fabricx.core.strategy_support.trial import Trial
from fabricx.model_parallel.batch_draws import BatchDraws
from fabricx.model_parallel.microbatches import rows_of, shares, split

# Relative differences that rounding explains, by the dtype of the weights: sums have a different order.
TOLERANCE: Final = {torch.float64: 1e-8, torch.float32: 1e-3}
HALF: Final = 0.1
IN_PARTS: Final = 1e-5  # least of these for two parts of a batch, as layers may compute in float32


@dataclass(frozen=True)
class Measured:
    """Loss and 2-norm of the gradient of two samples.

    Attributes:
        loss, norm: of all ranks that compute the samples together.
        tolerance: relative difference that rounding explains.
    """

    loss: float
    norm: float
    tolerance: float

    @property
    def finite(self) -> bool:
        """Whether both are numbers that can be compared."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def differs(self, other: Measured) -> bool:
        """Return whether two measurements can't be of the same model.

        Args:
            other: measurement of the same samples.
        """
        pairs = ((self.loss, other.loss), (self.norm, other.norm))
        return not all(math.isclose(a, b, rel_tol=self.tolerance, abs_tol=1e-12) or a == b for a, b in pairs)


def measure(
    compute: Callable[[], float], parameters: Iterable[Tensor], norm: Callable[[list[Tensor]], Tensor],
    dtypes: Iterable[torch.dtype], *, least: float = 0.0,
) -> Measured:  # fmt: skip
    """Return loss and gradient norm, and remove the gradients.

    Args:
        compute: computes the gradients, and returns the loss.
        parameters: parameters of the module.
        norm: returns the norm of the gradients of parameters.
        dtypes: data types of the computation.
        least: least tolerance.
    """
    trained = list(parameters)
    tolerance = max(least, tolerance_of(dtypes))
    try:
        return Measured(compute(), float(norm(trained)), tolerance)
    finally:
        for parameter in trained:
            parameter.grad = None


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative difference that rounding explains.

    Args:
        dtypes: data types of the computation.
    """
    return max(TOLERANCE.get(dtype, HALF) for dtype in dtypes)


def gradients_in_parts(trial: Trial, batch: Any) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return functions that compute the gradients of a batch, and of the same batch in microbatches.

    Each sample has the same random numbers in both. The functions return the loss, which for the parts is their mean,
    weighted as in a pipeline.

    Args:
        trial: the training step.
        batch: two samples, or a batch of the loader.

    Raises:
        ValueError: the batch can't be split.
    """
    parts = split(batch, 2)
    sizes = [rows_of(part) or 0 for part in parts]
    draws = BatchDraws(sum(sizes))

    def together() -> float:
        with trial.undisturbed(), draws.record():
            return _gradients(trial.step(batch, 0), 1.0)

    def apart() -> float:
        total, begin = 0.0, 0
        for part, share, rows in zip(parts, shares(parts, trial.weight), sizes, strict=True):
            if share:
                with trial.undisturbed(), draws.replay(begin, rows):
                    total += _gradients(trial.step(part, 0), share)
            begin += rows
        return total

    return together, apart


def changed_by_parts(strategy: str, together: Measured, apart: Measured, *, weighted: bool) -> str:
    """Return the error for a loss that is not the mean over microbatches.

    Args:
        strategy: name of the strategy.
        together: two samples, or a batch.
        apart: the mean over their microbatches.
        weighted: the module has `batch_weight`.
    """
    mean = "the mean of both samples"
    remedy = (
        "If the loss is a mean over tokens or other terms, define batch_weight(self, batch) in the module, which "
        "returns their number; if it is a sum, return the mean over samples; if it compares samples with each "
        "other, set microbatches=1"
    )
    if weighted:
        mean += ", weighted by batch_weight,"
        remedy = (
            "batch_weight has to return the number of terms of which the loss is the mean. If the loss compares "
            "samples with each other, or adds means over different terms, set microbatches=1"
        )
    return (
        f"strategy={strategy} computes the samples of a batch in microbatches, which would change the loss: for two "
        f"samples together the loss is {together.loss:.9g} and the norm of the gradient {together.norm:.9g}, and "
        f"{mean} has {apart.loss:.9g} and {apart.norm:.9g}. {remedy}"
    )


def _gradients(outputs: Any, share: float) -> float:
    loss = loss_of(outputs) * share
    loss.backward()
    return float(loss.detach())
