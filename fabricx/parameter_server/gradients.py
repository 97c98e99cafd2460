"""Gradients for a server's part of the parameters: their sums, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor

BLOCK: Final = 1 << 16  # elements


@final
@dataclass(slots=True)
class Gradient:
    """A gradient for a server's part of the parameters.

    Attributes:
        dense: gradients of all pieces, flat.
        missing: numbers of the pieces without a gradient.
        rows: rows by table with a gradient: ids of rows, shape [k], and their gradients, shape [k, width].
    """

    dense: Tensor
    missing: frozenset[int] = frozenset()
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def clone(self) -> Gradient:
        """Return a copy in new memory."""
        rows = {number: (ids.clone(), values.clone()) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense.clone(), self.missing, rows)

    def __truediv__(self, divisor: float) -> Gradient:
        rows = {number: (ids, values / divisor) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense / divisor, self.missing, rows)


def merge_rows(parts: Sequence[Mapping[int, tuple[Tensor, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Sum gradients of rows by id; ids are unique and ascending in the result.

    Args:
        parts: see `Gradient.rows`.
    """
    merged = {}
    for number in sorted({number for part in parts for number in part}):
        every = [part[number] for part in parts if number in part]
        ids, positions = torch.cat([ids for ids, _ in every]).unique(return_inverse=True)
        values = torch.cat([values for _, values in every])
        merged[number] = ids, values.new_zeros(len(ids), values.shape[1]).index_add_(0, positions, values)
    return merged


def add_up(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Write the sum of vectors, added in their order, to other vectors, which may be among them.

    The sum is computed in blocks, so that each vector is read once and results are still in the cache when copied.

    Args:
        parts: vectors to add.
        into: vectors to write.
    """
    later = {part.data_ptr() for part in parts[2:]}
    target = next((vector for vector in into if vector.data_ptr() not in later), None)
    for start in range(0, len(parts[0]), BLOCK):
        first, *others = (part[start : start + BLOCK] for part in parts)
        total = torch.empty_like(first) if target is None else target[start : start + BLOCK]
        if others:
            torch.add(first, others[0], out=total)
        else:
            total.copy_(first)
        for other in others[1:]:
            total.add_(other)
        for vector in into:
            if vector is not target:
                vector[start : start + BLOCK].copy_(total)


def clip(gradient: Tensor, kind: str, spans: Iterable[tuple[int, int]], limit: float) -> None:
    """Clip spans of a gradient in place.

    Args:
        gradient: flat.
        kind: "value" limits each element, "norm" the 2-norm of all spans.
        spans: (start, stop) of the pieces.
        limit: maximum.
    """
    pieces = [gradient[start:stop] for start, stop in spans]
    if not pieces:  # all parameters of the optimizer are on other servers
        return
    if kind == "value":
        torch._foreach_clamp_min_(pieces, -limit)
        torch._foreach_clamp_max_(pieces, limit)
        return
    norm = sum(float(piece.square().sum()) for piece in pieces) ** 0.5
    if (factor := norm_factor(norm, limit)) != 1.0:
        torch._foreach_mul_(pieces, factor)


def norm_factor(norm: float, limit: float) -> float:
    """Return the factor of gradients that are clipped to a norm, as torch's `clip_grad_norm_`: NaN for a norm of NaN.

    Args:
        norm: 2-norm of the gradients.
        limit: maximum norm.

    >>> norm_factor(0.5, 1.0), norm_factor(float("inf"), 1.0), norm_factor(float("nan"), 1.0)
    (1.0, 0.0, nan)
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor  # `min` would return 1.0 for NaN
