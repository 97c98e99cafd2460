"""The dimensions of a tensor that a call of a function addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def combined_dims(
    tensor: Tensor, position: int, args: Sequence[Any], options: Mapping[str, Any], default: int | None
) -> tuple[int, ...] | None:  # fmt: skip
    """Return the dimensions that a function combines, from 0; None for all.

    Args:
        tensor: first argument of the function.
        position: index of the argument `dim`.
        args, options: of the function.
        default: default of `dim`; None for all dimensions.

    >>> combined_dims(torch.ones(2, 3), 1, [torch.ones(2, 3), -1], {}, None)
    (1,)
    """
    dims = args[position] if len(args) > position else default
    dims = next((options[name] for name in ("dim", "axis", "dims") if name in options), dims)
    if isinstance(dims, Tensor):  # such as `torch.max(x, y)`
        return ()
    if len(args) > 2 and all(type(dim) is int for dim in args[1:]) and (position, default) == (1, None):
        # such as `x.flip(0, 1)`
        dims = args[1:]
    if isinstance(dims, bool) or not isinstance(dims, (int, tuple, list)):
        return None
    return tuple(sorted(dim % max(1, tensor.dim()) for dim in ([dims] if isinstance(dims, int) else dims)))


def selected_dims(tensor: Tensor, index: Any) -> tuple[int, ...]:
    """Return the dimensions of which an index selects elements by their number, from 0.

    Args:
        tensor: indexed tensor.
        index: as of `Tensor.__getitem__`. Slices of all elements, masks and tensors of numbers select by value.

    >>> selected_dims(torch.ones(2, 3, 4), (slice(None), slice(-1, None)))
    (1,)
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    widths = [
        0 if entry is None or isinstance(entry, bool)
        else entry.dim() if isinstance(entry, Tensor) and entry.dtype is torch.bool
        else 1
        for entry in entries
    ]  # fmt: skip
    dims, dim = list[int](), 0
    for number, (entry, width) in enumerate(zip(entries, widths, strict=True)):
        if entry is Ellipsis:
            dim = tensor.dim() - sum(widths[number + 1 :])
            continue
        bounds = (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else ()
        if type(entry) is int or (
            bounds
            and all(bound is None or type(bound) is int for bound in bounds)
            and len(range(tensor.shape[dim])[entry]) < tensor.shape[dim]
        ):
            dims.append(dim)
        dim += width
    return tuple(dims)
