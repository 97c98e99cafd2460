"""PowerSGD: two low-rank factors in place of the gradient of a matrix, with error feedback."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor


@final
class LowRankMatrix:
    """The gradient of a parameter as a product of two factors, which ranks sum one after the other.

    A parameter is a matrix of its first dim by all other dims: `rows` by `columns`. The error of a rank is the
    difference to this rank's own contribution, so the errors of all ranks sum to the error of the sum.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1.

    Args:
        parameter: a parameter that `is_compressible`.
        rank: columns of the factors.

    Attributes:
        lost: this rank's error, which is added to the next gradient, shape [rows, columns].
        basis: the newest second factor, with which the next gradient is projected, shape [columns, rank].
    """

    def __init__(self, parameter: Tensor, rank: int) -> None:
        self.rows, self.columns = len(parameter), parameter[0].numel()
        like: dict[str, Any] = {
            "dtype": torch.promote_types(parameter.dtype, torch.float32),
            "device": parameter.device,
        }
        self.lost = torch.zeros(self.rows, self.columns, **like)
        chance = torch.Generator().manual_seed(self.columns)
        self.basis = torch.randn(self.columns, rank, generator=chance).to(**like)
        self._corrected = self._orthogonal = torch.empty(0)
        self._finite = torch.tensor(True)  # the gradients of all ranks are finite

    def project(self, gradient: Tensor) -> Tensor:
        """Return the first factor of this rank's gradient, shape [rows, rank], to be summed over ranks.

        Args:
            gradient: gradient in the parameter's shape.
        """
        self._corrected = self.lost + gradient.reshape(self.lost.shape)
        return self._corrected @ self.basis

    def orthogonalise(self, left: Tensor) -> None:
        """Take the sum of the first factors.

        Args:
            left: shape [rows, rank].
        """
        self._finite = left.isfinite().all()
        self._orthogonal, _ = torch.linalg.qr(left)

    def project_back(self) -> Tensor:
        """Return the second factor of this rank's gradient, shape [columns, rank], to be summed; update the error.

        Error and basis remain if a gradient isn't finite: a caller skips the update, and later gradients are finite.
        """
        corrected, self._corrected = self._corrected, torch.empty(0)
        right = corrected.T @ self._orthogonal
        self.lost = torch.where(self._finite, corrected - self._orthogonal @ right.T, self.lost)
        return right

    def restore(self, right: Tensor) -> Tensor:
        """Return the approximate sum of the gradients of all ranks, shape [rows, columns].

        Args:
            right: sum of the second factors, shape [columns, rank]; becomes the basis.
        """
        self.basis = torch.where(self._finite, right, self.basis)
        return self._orthogonal @ right.T


def is_compressible(parameter: Tensor, rank: int) -> bool:
    """Return whether the factors of a parameter have fewer elements than the parameter.

    Args:
        parameter: any parameter.
        rank: columns of the factors.
    """
    if parameter.dim() < 2 or not parameter.numel():
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns
