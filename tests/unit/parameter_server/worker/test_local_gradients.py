"""Gradients that are parts of a sum can be dropped and checked, but not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fabricx.parameter_server.worker.local_gradients import LocalGradients
from fabricx.parameter_server.worker.unreduced_gradients import GradientElsewhere


def three() -> tuple[list[Tensor], LocalGradients]:
    """Return three parameters, the last without a gradient, and their gradients."""
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.ones(2)
    return parameters, LocalGradients(parameters)


def present(gradients: LocalGradients) -> list[bool]:
    return [gradient is not None for gradient in gradients.all()]


def test_hidden_gradients_cannot_be_read_and_can_be_dropped() -> None:
    (first, second, third), gradients = three()
    with gradients.hidden():
        with pytest.raises(GradientElsewhere):
            assert first.grad.norm()  # type: ignore[union-attr]
        gradients.drop([first, third])
        assert present(gradients) == [False, True, False]
    assert first.grad is None
    assert torch.equal(second.grad, torch.ones(2))  # type: ignore[arg-type]


def test_gradients_are_dropped_and_cleared() -> None:
    (first, *_), gradients = three()
    gradients.drop([first])
    assert present(gradients) == [False, True, False]
    gradients.clear()
    assert present(gradients) == [False, False, False]


@pytest.mark.parametrize(("value", "workers", "refused"), [(1e30, 2, False), (3e38, 1, False), (3e38, 2, True)])
def test_a_gradient_whose_sum_would_overflow_is_not_finite(value: float, workers: int, refused: bool) -> None:
    parameters, gradients = three()
    parameters[1].grad = torch.tensor([0.0, value])
    nonfinite = gradients.nonfinite(parameters, workers)
    assert [parameter is parameters[1] for parameter in nonfinite] == [True] * refused
    assert gradients.nonfinite(parameters[:1], workers) == []


def test_a_sparse_gradient_cannot_be_clipped() -> None:
    parameters, gradients = three()
    assert gradients.check_dense(iter(parameters)) == parameters
    parameters[0].grad = torch.ones(2).to_sparse()
    assert len(gradients.check_dense(parameters[1:])) == 2
    with pytest.raises(ValueError, match="torch can't clip sparse gradients"):
        gradients.check_dense(parameters)
