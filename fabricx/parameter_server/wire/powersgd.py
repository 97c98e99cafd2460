"""PowerSGD with servers: low-rank factors are exchanged in place of the gradients of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from fabricx.distributed.compression.powersgd import LowRankMatrix, is_compressible


@final
class LowRank:
    """Sums gradients over workers in two rounds of low-rank factors, with error feedback; see `LowRankMatrix`.

    Args:
        parameters: the same on all workers, in the same order.
        rank: rank of the approximation.

    Attributes:
        carriers: tensors with the gradients that are exchanged in place of the parameters' gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], rank: int) -> None:
        self._matrices = [_CarriedMatrix(p, rank) for p in parameters if is_compressible(p, rank)]
        self._device = parameters[0].device.type if parameters else "cpu"
        compressed = {id(matrix.parameter) for matrix in self._matrices}
        self._others = [parameter for parameter in parameters if id(parameter) not in compressed]
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
            matrix.restore()

    def state(self) -> list[dict[str, Tensor]]:
        """Return error and basis of each compressed parameter."""
        return [{"lost": matrix.factors.lost, "basis": matrix.factors.basis} for matrix in self._matrices]

    def load(self, state: Sequence[dict[str, Tensor]]) -> None:
        """Load a result of `state`.

        Args:
            state: state of the same parameters.
        """
        for matrix, saved in zip(self._matrices, state, strict=True):
            matrix.factors.lost.copy_(saved["lost"])
            matrix.factors.basis.copy_(saved["basis"])


class _CarriedMatrix:
    """A parameter with two tensors that carry the factors as gradients."""

    def __init__(self, parameter: Tensor, rank: int) -> None:
        self.parameter = parameter
        self.factors = LowRankMatrix(parameter, rank)
        like = self.factors.lost
        self.left = nn.Parameter(like.new_zeros(self.factors.rows, rank))
        self.right = nn.Parameter(like.new_zeros(self.factors.columns, rank))
        self._has_part = False  # this worker has a gradient

    def project(self) -> None:
        # The error of a worker without a gradient waits for its next gradient: no worker may have one, as after the
        # parameter was frozen.
        gradient = self.parameter.grad
        self._has_part = gradient is not None
        self.left.grad = None if gradient is None else self.factors.project(gradient)
        self.right.grad = None

    def project_back(self) -> None:
        summed, self.left.grad = self.left.grad, None
        if summed is not None:
            self.factors.orthogonalise(summed)
            self.right.grad = self.factors.project_back() if self._has_part else None

    def restore(self) -> None:
        summed, self.right.grad = self.right.grad, None
        if summed is None:
            self.parameter.grad = None
        else:
            gradient = self.factors.restore(summed).view(self.parameter.shape)
            self.parameter.grad = gradient.to(self.parameter.dtype)
