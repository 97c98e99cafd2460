"""Split a batch into microbatches by its rows."""

from __future__ import annotations

import datetime
import enum
import functools
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fabricx.errors import PossibleUserWarning
from fabricx.model_parallel.nested import children, with_children

_PLAIN: Final = (
    str, bytes, int, float, complex, bool, type(None), enum.Enum, pathlib.PurePath, datetime.date, datetime.timedelta,
    np.generic, torch.dtype, torch.device, torch.Size, slice,
)  # fmt: skip
REMEDY: Final = "let the loader return tensors whose first dimension are the samples, or set microbatches=1"


def rows_of(batch: Any) -> int | None:
    """Return the number of samples of a batch: the length of the first tensor with a dimension; else None.

    Args:
        batch: nested tuples, lists, mappings and dataclasses.

    >>> rows_of({"step": torch.tensor(1), "x": torch.zeros(3, 2)})
    3
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    inside = children(batch)
    counts = (rows_of(child) for _, child in inside or ())
    return next((rows for rows in counts if rows is not None), None)


def split(batch: Any, microbatches: int) -> list[Any]:
    """Split a batch by rows; microbatches differ by at most 1 row, and none is empty.

    Tensors, arrays and lists of texts with as many entries as the batch has samples are split. Other tensors, numbers
    and texts are the same in each microbatch.

    Args:
        batch: nested tuples, lists, mappings and dataclasses.
        microbatches: number of parts, fewer for a batch with fewer rows; 1 returns the batch as it is.

    Raises:
        ValueError: the batch has no tensor with rows, or an object that can't be split.

    >>> [part.tolist() for part in split(torch.arange(7), 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    if microbatches == 1:
        return [batch]
    rows = rows_of(batch)
    if not rows:
        has = "a batch without samples" if rows == 0 else "a batch without a tensor that has samples"
        raise ValueError(f"{has} can't be split into {microbatches} microbatches: {REMEDY}")
    parts = min(microbatches, rows)
    sizes = [rows // parts + (number < rows % parts) for number in range(parts)]
    begins = [sum(sizes[:number]) for number in range(parts)]
    return [_part(batch, rows, begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _part(value: Any, rows: int, begin: int, end: int) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise ValueError(f"a batch has a nested or sparse tensor, whose rows can't be split: {REMEDY}")
        if not value.dim() or value.shape[0] != rows:
            return value
        part = value[begin:end]
        # Of `data`, a change in place by the step is not counted as a change of the other microbatches.
        return part if part.requires_grad else part.data
    if isinstance(value, np.ndarray):
        return value[begin:end] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, _PLAIN):
        return value
    inside = children(value)
    if inside is None or isinstance(value, PackedSequence):
        raise ValueError(
            f"a batch has an object of class {type(value).__name__}, whose samples can't be split into microbatches: "
            + REMEDY
        )
    if isinstance(value, (list, tuple)) and len(value) == rows and all(isinstance(item, str) for item in value):
        return value[begin:end]
    new = {key: part for key, child in inside if (part := _part(child, rows, begin, end)) is not child}
    if not new:
        return value
    return with_children(value, new)


def shares(parts: Sequence[Any], weight: Callable[[Any], float] | None = None) -> list[float]:
    """Return the part of each microbatch in its batch.

    Args:
        parts: the microbatches.
        weight: returns the weight of a microbatch; None for its number of samples.

    >>> shares([torch.ones(3), torch.ones(1)])
    [0.75, 0.25]
    """
    if len(parts) == 1:
        return [1.0]
    weights = [weight(part) if weight else float(rows_of(part) or 0) for part in parts]
    total = sum(weights)
    return [share / total if total else 1.0 / len(parts) for share in weights]


def joined(outputs: Sequence[Any], rows: Sequence[int | None], shares: Sequence[float]) -> Any:
    """Join the results of a step for the microbatches of a batch.

    Tensors and lists with the rows of their microbatch are concatenated. Other floating-point values are averaged by
    the parts of the microbatches in the batch, so that the loss is that of the batch; the loss of a microbatch of
    weight 0 may be NaN. Numbers of samples of microbatches that differ in size are added up. Other values are from the
    first microbatch, with a warning if they differ, or are the size of each microbatch, which may be a constant.

    Args:
        outputs: outputs by microbatch; None for a microbatch without a loss.
        rows: samples of the microbatches, before their steps, which may remove entries.
        shares: their parts of the batch.

    Returns:
        nested as the outputs, without graphs; None without an output.

    >>> losses = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(4.0)}]
    >>> joined(losses, [2, 1], [2 / 3, 1 / 3])
    {'loss': tensor(2.)}
    """
    numbers = [number for number, output in enumerate(outputs) if output is not None]
    if not numbers:
        return None
    sizes = [rows[number] for number in numbers]
    weights = [shares[number] for number in numbers]
    total = sum(weights)
    weights = [weight / total if total else 1.0 / len(numbers) for weight in weights]
    differing: list[str] = []
    whole = _joined_leaf([outputs[number] for number in numbers], sizes, weights, "", differing)
    if differing:
        warnings.warn(
            f"training_step returns {', '.join(differing)}, which seems to be of each microbatch of a pipeline: hooks "
            "receive the value of the first. Return a tensor or a list with an item for each sample, a mean as a "
            "floating-point number, or set microbatches=1",
            PossibleUserWarning,
            stacklevel=2,
        )
    return whole


def _joined_leaf(
    values: list[Any], sizes: Sequence[int | None], weights: Sequence[float], name: str, differing: list[str]
) -> Any:  # fmt: skip
    """Join the values of an entry; adds the name of an entry that can't be joined to `differing`."""
    first = values[0]
    if isinstance(first, Tensor):
        values = [value.detach() if isinstance(value, Tensor) else value for value in values]
        first = values[0]
    if len(values) == 1:
        return first
    if not all(isinstance(value, type(first)) for value in values):
        differing.append(name)
        return first
    if _have_rows(values, sizes):
        return torch.cat(values) if isinstance(first, Tensor) else [item for value in values for item in value]
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        if not isinstance(first, Tensor) or all(value.shape == first.shape for value in values):
            return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    elif type(first) is int and values == list(sizes):
        if len(set(sizes)) > 1:
            return sum(values)
        differing.append(name)
        return first
    inside = None if isinstance(first, Tensor) else children(first)
    if inside is None:
        if not all(map(functools.partial(_same, first), values)):
            differing.append(name)
        return first
    others = [dict(children(value) or ()) for value in values]
    new = {
        key: _joined_leaf([other[key] for other in others], sizes, weights, name or str(key), differing)
        for key, _ in inside
        if all(key in other for other in others)
    }
    return with_children(first, {key: value for key, value in new.items() if value is not others[0][key]})


def _have_rows(values: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Return whether each value is a tensor, or a list of other values, with an item for each sample."""
    tensors = isinstance(values[0], Tensor)
    if not tensors and (type(values[0]) is not list or any(isinstance(item, Tensor) for item in values[0])):
        return False
    if tensors and not all(value.dim() for value in values):
        return False
    return all(len(value) == size for value, size in zip(values, sizes, strict=True))


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; an object that can't be compared is equal to any."""
    if isinstance(value, Tensor):
        return torch.equal(value, other)
    return not isinstance(value, _PLAIN) or bool(value == other) or value != value
