"""Dimensions that calls combine, or of which they select elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricx.model_parallel.context.addressed_dims import combined_dims, selected_dims

X = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("position", "args", "options", "default", "dims"),
    [
        (1, (X, -1), {}, None, (2,)),
        (1, (X,), {"dim": (0, 1)}, None, (0, 1)),
        (1, (X,), {}, None, None),
        (1, (X, 0, 1), {}, None, (0, 1)),  # `x.flip(0, 1)`
        (1, (X, 1, -1), {}, 0, (1,)),  # `x.select(1, -1)`
        (2, (X, 2), {}, 0, (0,)),  # `x.chunk(2)`
        (2, (X, [1, 2], -2), {}, 0, (1,)),  # `x.split([1, 2], -2)`
        (1, (X, X), {}, None, ()),  # `torch.max(x, x)`
    ],
)
def test_combined_dims(position: int, args: Any, options: Any, default: int | None, dims: Any) -> None:
    assert combined_dims(X, position, args, options, default) == dims


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        (0, (0,)),
        ((slice(None), -1), (1,)),
        ((..., slice(1, None)), (2,)),
        ((slice(0, 9), None, slice(0, 2)), (1,)),
        ((..., None, slice(None, -1), slice(None)), (1,)),
        ((X[:, :, 0] > 0, 0), (2,)),
        (torch.tensor([0, 1]), ()),
        (True, ()),
        (None, ()),
    ],
)
def test_selected_dims(index: Any, dims: tuple[int, ...]) -> None:
    assert selected_dims(X, index) == dims
