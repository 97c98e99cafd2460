"""Low-rank factors of gradients: the sum of ranks is approximate, and errors are sent later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fabricx.distributed.compression.powersgd import LowRankMatrix, is_compressible

SHAPE = (6, 3, 4)  # a matrix of 6 by 12


def summed(matrices: list[LowRankMatrix], gradients: list[Tensor]) -> Tensor:
    """Return the approximate sum of the gradients of several ranks."""
    left = sum((m.project(g) for m, g in zip(matrices, gradients, strict=True)), torch.zeros(1))
    for matrix in matrices:
        matrix.orthogonalise(left)
    right = sum((matrix.project_back() for matrix in matrices), torch.zeros(1))
    [first, *others] = [matrix.restore(right) for matrix in matrices]
    assert all(torch.equal(first, other) for other in others)
    return first


def test_a_gradient_of_the_rank_of_the_factors_is_exact() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(SHAPE))
    gradients = [torch.outer(torch.randn(6), torch.randn(12)).view(SHAPE) for _ in range(2)]
    total = summed([LowRankMatrix(parameter, 2) for _ in gradients], gradients)
    assert torch.allclose(total.view(SHAPE), gradients[0] + gradients[1], atol=1e-5)


def test_the_error_is_sent_later() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(SHAPE))
    gradient, zero = torch.randn(SHAPE), torch.zeros(SHAPE)
    matrices = [LowRankMatrix(parameter, 1) for _ in range(2)]
    sent = summed(matrices, [gradient, zero])
    for _ in range(100):
        sent = sent + summed(matrices, [zero, zero])
    assert torch.allclose(sent.view(SHAPE), gradient, atol=1e-3)
    assert all(float(matrix.lost.abs().max()) < 1e-3 for matrix in matrices)


def test_only_matrices_whose_factors_are_smaller_are_compressed() -> None:
    assert is_compressible(torch.zeros(6, 12), 3)
    assert not is_compressible(torch.zeros(6, 12), 4)
    assert not is_compressible(torch.zeros(72), 1)
    assert not is_compressible(torch.zeros(0, 12), 1)


def test_a_non_finite_gradient_does_not_change_the_state() -> None:
    torch.manual_seed(0)
    matrices = [LowRankMatrix(nn.Parameter(torch.zeros(SHAPE)), 1) for _ in range(2)]
    gradient = torch.randn(SHAPE)
    summed(matrices, [gradient, gradient])
    kept = [(matrix.lost.clone(), matrix.basis.clone()) for matrix in matrices]
    for bad in (torch.nan, torch.inf):
        spoilt = gradient.clone()
        spoilt[0, 0, 0] = bad
        left = matrices[0].project(spoilt) + matrices[1].project(gradient)
        for matrix in matrices:
            matrix.orthogonalise(left)
        right = matrices[0].project_back() + matrices[1].project_back()
        assert not bool(matrices[1].restore(right).isfinite().all())  # detected by all ranks
        matrices[0].restore(right)
        for matrix, (lost, basis) in zip(matrices, kept, strict=True):
            assert torch.equal(matrix.lost, lost)
            assert torch.equal(matrix.basis, basis)
