"""Comparison of a module before and after it is divided: loss and gradient norm of two samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

# Relative differences that rounding explains, by the dtype of the weights: sums are in another order.
TOLERANCE: Final = {torch.float64: 1e-8, torch.float32: 1e-3}
HALF: Final = 0.1


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
    dtypes: Iterable[torch.dtype],
) -> Measured:  # fmt: skip
    """Return loss and gradient norm, and remove the gradients.

    Args:
        compute: computes the gradients, and returns the loss.
        parameters: parameters of the module.
        norm: returns the norm of the gradients of parameters.
        dtypes: data types of the computation.
    """
    trained = list(parameters)
    loss = compute()
    measured = Measured(loss, float(norm(trained)), max(TOLERANCE.get(dtype, HALF) for dtype in dtypes))
    for parameter in trained:
        parameter.grad = None
    return measured
