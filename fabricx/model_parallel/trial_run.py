"""Comparison of a module before and after it is divided: loss and gradient norm of two samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fabricx.core.loss import loss_of
from fabricx.core.rng import RandomState
from fabricx.core.trial import Trial
from fabricx.model_parallel.microbatches import shares, split

# Relative differences that rounding explains, by the dtype of the weights: sums are in another order.
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

    def differs(self, other: Measured) -> bool:
        """Return whether another measurement can't be of the same model.

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
    loss = compute()
    tolerance = max(least, *(TOLERANCE.get(dtype, HALF) for dtype in dtypes))
    measured = Measured(loss, float(norm(trained)), tolerance)
    for parameter in trained:
        parameter.grad = None
    return measured


def gradients_in_parts(trial: Trial) -> float:
    """Compute the gradients of the trial's samples in two parts, as microbatches.

    Args:
        trial: the training step on two samples.

    Returns:
        the mean of both losses, weighted as in a pipeline. NaN if it can't be compared with the loss of the samples
        together: the step draws random numbers, or can't be computed for a part.

    Raises:
        ValueError: the batch can't be split.
    """
    parts, total = split(trial.batch, 2), 0.0
    for part, share in zip(parts, shares(parts, trial.weight), strict=True):
        if not share:
            continue
        before = RandomState()
        with trial.undisturbed():
            try:
                loss = loss_of(trial.step(part, 0)) * share
            except Exception:  # such as a step that needs several samples, or a part without a loss
                return math.nan
            if before.differs(RandomState()):
                return math.nan
        loss.backward()
        total += float(loss.detach())
    return total
