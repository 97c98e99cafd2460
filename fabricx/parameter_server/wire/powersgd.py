"""PowerSGD: low-rank factors in place of the gradients of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class LowRank:
    """Sums gradients over workers in two rounds of low-rank factors, with error feedback.

    Source: PowerSGD, Vogels et al., NeurIPS 2019, algorithm 1. Each worker keeps the error of its own part; the errors
    of all workers sum to the error of the sum.

    Args:
        parameters: the same on all workers, in the same order.
        rank: of the approximation.

    Attributes:
        carriers: tensors whose gradients are exchanged in place of the parameters' gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], rank: int) -> None:
        self._matrices = [_Matrix(parameter, rank) for parameter in parameters if _is_worth_it(parameter, rank)]
        self._device = parameters[0].device.type if parameters else "cpu"
        thin = {id(matrix.parameter) for matrix in self._matrices}
        self._others = [parameter for parameter in parameters if id(parameter) not in thin]
        lefts, rights = [m.left for m in self._matrices], [m.right for m in self._matrices]
        self.carriers = [*lefts, *rights, *self._others]

    def join(self, exchange: Callable[[], None]) -> None:
        """Replace the parameters' gradients by approximate sums over all workers.

        Args:
            exchange: sums the gradients of the carriers over all workers.
        """
        # A manual step may call backward inside autocast, which would round the products.
        with torch.autocast(self._device, enabled=False):
            self._join(exchange)

    def _join(self, exchange: Callable[[], None]) -> None:
        for matrix in self._matrices:
            matrix.project()
        exchange()
        aside = [other.grad for other in self._others]
        for other in self._others:
            other.grad = None
        for matrix in self._matrices:
            matrix.project_back()
        exchange()
        for other, gradient in zip(self._others, aside, strict=True):
            other.grad = gradient
        for matrix in self._matrices:
            matrix.settle()

    def state(self) -> list[dict[str, Tensor]]:
        """Return error and basis of each compressed parameter."""
        return [{"lost": matrix.lost, "basis": matrix.basis} for matrix in self._matrices]

    def load(self, state: Sequence[dict[str, Tensor]]) -> None:
        """Load a result of `state`.

        Args:
            state: of the same parameters.
        """
        for matrix, saved in zip(self._matrices, state, strict=True):
            matrix.lost.copy_(saved["lost"])
            matrix.basis.copy_(saved["basis"])


class _Matrix:
    """A parameter as a matrix: the first dim by all other dims."""

    def __init__(self, parameter: Tensor, rank: int) -> None:
        self.parameter = parameter
        rows, columns = len(parameter), parameter[0].numel()
        like: dict[str, Any] = {
            "dtype": torch.promote_types(parameter.dtype, torch.float32),
            "device": parameter.device,
        }
        self.left = nn.Parameter(torch.zeros(rows, rank, **like))
        self.right = nn.Parameter(torch.zeros(columns, rank, **like))
        self.lost = torch.zeros(rows, columns, **like)
        self.basis = torch.randn(columns, rank, generator=torch.Generator().manual_seed(columns)).to(**like)
        self._corrected: Tensor | None = None  # this worker's gradient plus the earlier error

    def project(self) -> None:
        gradient, corrected = self.parameter.grad, self.lost
        if gradient is not None:
            corrected = corrected + gradient.reshape(corrected.shape)
        self._corrected = None if gradient is None and not bool(self.lost.any()) else corrected
        self.left.grad = None if self._corrected is None else self._corrected @ self.basis
        self.right.grad = None

    def project_back(self) -> None:
        summed, self.left.grad = self.left.grad, None
        if summed is None:
            return
        self._orthogonal, _ = torch.linalg.qr(summed)
        if self._corrected is not None:
            factor = self._corrected.T @ self._orthogonal
            self.right.grad = factor
            self.lost = self._corrected - self._orthogonal @ factor.T

    def settle(self) -> None:
        summed, self.right.grad, self._corrected = self.right.grad, None, None
        if summed is None:
            self.parameter.grad = None
            return
        self.basis = summed
        gradient = (self._orthogonal @ summed.T).view(self.parameter.shape)
        self.parameter.grad = gradient.to(self.parameter.dtype)


def _is_worth_it(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2 or not parameter.numel():
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns
