"""Dims of a tensor that contain the output features of linear layers, through views, splits and other operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

Span = tuple[str, int, int]  # name of a layer, its first output feature, and the feature after the last
_PRIMES: Final = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@dataclass(frozen=True)
class Features:
    """Output features of linear layers in a tensor.

    Attributes:
        spans: layers and ranges of their features; of several layers after an operation on several tensors.
        dims: dims that the features are in, outermost first, such as heads and features of a head; () if an operation
            has mixed them.
        lost: the operation that has mixed them.
    """

    spans: tuple[Span, ...]
    dims: tuple[int, ...]
    lost: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the layers."""
        return tuple(name for name, _, _ in self.spans)

    def without_dims(self, operation: str) -> Features:
        """Return the features after an operation that mixes them.

        Args:
            operation: its name.
        """
        return replace(self, dims=(), lost=self.lost or operation)

    def is_flat(self, shape: Sequence[int]) -> bool:
        """Return whether a single dim has exactly these features.

        Args:
            shape: shape of the tensor.
        """
        return len(self.dims) == 1 and all(stop - start == shape[self.dims[0]] for _, start, stop in self.spans)


def narrowed(features: Features, size: int, begin: int, end: int) -> Features:
    """Return the features after a cut of the outermost dim.

    Args:
        features: features of the tensor before.
        size: size of the outermost dim.
        begin: first index that is kept.
        end: index after the last.
    """
    spans = []
    for name, start, stop in features.spans:
        unit = (stop - start) // size
        spans.append((name, start + begin * unit, start + end * unit))
    return replace(features, spans=tuple(spans))


def viewed(features: Features, before: Sequence[int], after: Sequence[int]) -> Features | None:
    """Return the features after a view; None if it merges the outermost dim into a dim outside of it.

    Args:
        features: before; with dims.
        before: shape before.
        after: shape after.

    >>> viewed(Features((("q", 0, 32),), (2,)), (8, 5, 32), (8, 5, 4, 8)).dims
    (2, 3)
    >>> viewed(Features((("q", 0, 32),), (2, 3)), (8, 5, 4, 8), (8, 5, 32)).dims
    (2,)
    """
    moved: dict[int, list[int]] = {}
    for dims_before, dims_after in _groups(before, after):
        inside = [dim for dim in features.dims if dim in dims_before]
        ins = [dim for dim in dims_before if before[dim] != 1]
        outs = [dim for dim in dims_after if after[dim] != 1]
        if len(ins) == 1 and ins[0] in inside:
            moved[ins[0]] = outs
        elif len(ins) > 1 and features.dims[0] in inside:
            if ins[0] != features.dims[0] or not outs:
                return None
            moved[ins[0]] = outs[:1]
    dims = [dim for before_dim in features.dims for dim in moved.get(before_dim, ())]
    return replace(features, dims=tuple(dims)) if moved.get(features.dims[0]) else None


def merges(features: Features, before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether a view merges the outermost dim, such as heads, with inner dims.

    Args:
        features: before.
        before: shape before.
        after: shape after.
    """
    for ins, _ in _groups(before, after):
        if features.dims[0] in ins:
            return sum(before[dim] != 1 for dim in ins) > 1
    return False


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return groups of dims before and after a view whose products of sizes are equal, as small as possible."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        ins, outs, size_in, size_out = [i], [j], before[i], after[j]
        while size_in != size_out:
            if size_in < size_out and ins[-1] + 1 < len(before):
                ins.append(ins[-1] + 1)
                size_in *= before[ins[-1]]
            elif outs[-1] + 1 < len(after):
                outs.append(outs[-1] + 1)
                size_out *= after[outs[-1]]
            else:
                return [(list(range(len(before))), list(range(len(after))))]
        groups.append((ins, outs))
        i, j = ins[-1] + 1, outs[-1] + 1
    return groups


def permuted(features: Features, function: Any, args: Sequence[Any], options: dict[str, Any]) -> Features:
    """Return the features after a permutation of dims.

    Args:
        features: before.
        function: function that permutes dims, such as `torch.Tensor.transpose`.
        args: its arguments, the tensor first.
        options: its named arguments.
    """
    probe = torch.empty(_PRIMES[: args[0].dim()], device="meta")  # sizes show where each dim is afterwards
    order = [_PRIMES.index(size) for size in function(probe, *args[1:], **options).shape]
    return replace(features, dims=tuple(order.index(dim) for dim in features.dims))


def broadcast(features: Features, before: Sequence[int], after: Sequence[int]) -> Features | None:
    """Return the features after an operation on single elements, or of inner dims; None if the outermost dim is lost.

    Args:
        features: before; with dims.
        before: shape of the operand.
        after: shape of the result.
    """
    moved = len(after) - len(before)
    dims = [dim + moved for dim in features.dims if 0 <= dim + moved < len(after)]
    kept = [dim for dim in dims if after[dim] == before[dim - moved]]
    if not kept or kept[0] != features.dims[0] + moved:
        return None
    return replace(features, dims=tuple(kept))


@dataclass(frozen=True)
class Index:
    """One entry of an index: a range of a dim, a single element of a dim, or a new dim.

    Attributes:
        dim: dimension of the tensor; None for a new dim.
        begin: first element.
        end: element after the last.
        step: step of a range.
        drops: whether the dim is gone afterwards.
    """

    dim: int | None
    begin: int = 0
    end: int = 1
    step: int = 1
    drops: bool = False


def indices(shape: Sequence[int], index: Any) -> list[Index] | None:
    """Return the entries of an index in order; None if it contains a tensor or a list, or is out of range.

    Args:
        shape: shape of the tensor.
        index: argument of `tensor[index]`.

    >>> indices((4, 6), (..., slice(0, 3)))
    [Index(dim=0, begin=0, end=4, step=1, drops=False), Index(dim=1, begin=0, end=3, step=1, drops=False)]
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(not (entry is None or entry is Ellipsis or type(entry) in (int, slice)) for entry in entries):
        return None
    consumed = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    taken: list[Index] = []
    dim = 0
    for entry in entries:
        if entry is None:
            taken.append(Index(None))
        elif entry is Ellipsis:
            rest = len(shape) - consumed
            taken += [Index(dim + i, 0, shape[dim + i]) for i in range(rest)]
            dim += rest
        elif isinstance(entry, int):
            if not -shape[dim] <= entry < shape[dim]:
                return None
            at = entry % shape[dim]
            taken.append(Index(dim, at, at + 1, 1, True))
            dim += 1
        else:
            begin, end, step = entry.indices(shape[dim])
            taken.append(Index(dim, begin, max(begin, end), step))
            dim += 1
    return taken


@functools.cache
def sections(size: int, sizes: int | tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of `torch.split`.

    Args:
        size: size of the dim.
        sizes: sizes of the sections; an int for all sections.

    >>> sections(7, 3), sections(7, (3, 4))
    (((0, 3), (3, 6), (6, 7)), ((0, 3), (3, 7)))
    """
    if isinstance(sizes, int):
        return tuple((at, min(at + sizes, size)) for at in range(0, size, max(sizes, 1)))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple((end - length, end) for end, length in zip(ends, sizes, strict=True))
