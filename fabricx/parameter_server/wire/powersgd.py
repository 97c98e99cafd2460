"""Low-rank compression of matrices: two thin factors replace each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class LowRank:
    """Joins gradients in two rounds, and adds what was lost to the next ones (error feedback).

    Source: PowerSGD, Vogels et al., NeurIPS 2019, algorithm 1. A worker keeps what is lost of its own part: the parts
    that were lost add up to what the sum lacks.

    Args:
        parameters: the same on all workers, in the same order.
        rank: of the approximation.

    Attributes:
        carriers: tensors whose gradients travel in the place of the parameters'.
    """

    def __init__(self, parameters: Sequence[Tensor], rank: int) -> None:
        self._matrices = [_Matrix(parameter, rank) for parameter in parameters if _is_worth_it(parameter, rank)]
        self._device = parameters[0].device.type if parameters else "cpu"
        thin = {id(matrix.parameter) for matrix in self._matrices}
        self._others = [parameter for parameter in parameters if id(parameter) not in thin]
        lefts, rights = [m.left for m in self._matrices], [m.right for m in self._matrices]
        self.carriers = [*lefts, *rights, *self._others]

    def join(self, exchange: Callable[[], None]) -> None:
        """Let the parameters' gradients be near the sums of all workers'; `exchange` sums those of the carriers."""
        # A manual step calls backward where autocast is on, which would round the products.
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
        """Return what is kept for the next gradients."""
        return [{"lost": matrix.lost, "basis": matrix.basis} for matrix in self._matrices]

    def load(self, state: Sequence[dict[str, Tensor]]) -> None:
        """Take over what `state` has returned."""
        for matrix, saved in zip(self._matrices, state, strict=True):
            matrix.lost.copy_(saved["lost"])
            matrix.basis.copy_(saved["basis"])


class _Matrix:
    """One parameter, seen as a matrix: its first dimension by all others."""

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
        self._given: Tensor | None = None  # this worker's gradient, with what was lost before

    def project(self) -> None:
        gradient, given = self.parameter.grad, self.lost
        if gradient is not None:
            given = given + gradient.reshape(given.shape)
        self._given = None if gradient is None and not bool(self.lost.any()) else given
        self.left.grad = None if self._given is None else self._given @ self.basis
        self.right.grad = None

    def project_back(self) -> None:
        summed, self.left.grad = self.left.grad, None
        if summed is None:
            return
        self._orthogonal, _ = torch.linalg.qr(summed)
        if self._given is not None:
            factor = self._given.T @ self._orthogonal
            self.right.grad = factor
            self.lost = self._given - self._orthogonal @ factor.T

    def settle(self) -> None:
        summed, self.right.grad, self._given = self.right.grad, None, None
        if summed is None:
            self.parameter.grad = None
            return
        self.basis = summed
        found = (self._orthogonal @ summed.T).view(self.parameter.shape)
        self.parameter.grad = found.to(self.parameter.dtype)


def _is_worth_it(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2 or not parameter.numel():
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns
