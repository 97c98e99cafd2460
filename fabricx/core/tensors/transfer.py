"""Moves batches to devices, converts their dtypes, and counts their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor, and every other object with a method `to`, on a device.

    Args:
        batch: any nesting of collections.
        device: destination.
    """
    return apply_to_collection(batch, _Movable, lambda item: _move(item, device))


def with_own_move(batch: Any) -> Any:
    """Return a batch that is in main memory already, where objects with a method `to` of their own have been moved.

    Such a method may do more than move; tensors are not touched.

    Args:
        batch: an object, or a list, tuple or dict of objects.
    """
    kind = type(batch)
    for part in batch.values() if kind is dict else batch if kind in (list, tuple) else (batch,):
        if not isinstance(part, Tensor) and callable(getattr(part, "to", None)):
            return to_device(batch, torch.device("cpu"))
    return batch


def to_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with every floating-point tensor converted.

    Args:
        batch: any nesting of collections.
        dtype: data type of the result.
    """
    return apply_to_collection(batch, Tensor, lambda item: item.to(dtype) if item.is_floating_point() else item)


def cpu(outputs: Any) -> Any:
    """Return outputs, detached and in main memory.

    Args:
        outputs: any nesting of collections.
    """
    return apply_to_collection(outputs, Tensor, lambda item: item.detach().cpu())


class _HasTo(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor) or callable(getattr(instance, "to", None))


class _Movable(metaclass=_HasTo):
    """Anything with a method `to(device)`."""


def _move(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=device.type == "cuda")
    moved = item.to(device)
    return item if moved is None else moved  # some objects move in place and return None


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor, or 1 without a tensor.

    Args:
        batch: any nesting of collections.

    >>> batch_size_of({"x": torch.zeros(3, 2), "name": "a"})
    3
    """
    size = _first_size(batch)
    return 1 if size is None else size


def common_size(batch: Any) -> int | None:
    """Return the first dimension of the tensors of a batch, if it is the same for all of them; otherwise None.

    Args:
        batch: any nesting of lists, tuples and dicts.

    >>> common_size([torch.zeros(3, 2), {"y": torch.zeros(3)}]), common_size([torch.zeros(3), torch.zeros(2)])
    (3, None)
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch.

    Args:
        value: any nesting of lists, tuples and dicts.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)


def _first_size(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return 1 if value.dim() == 0 else int(value.shape[0])
    if isinstance(value, str):
        return None
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in fields(value)]
    else:
        return None
    sizes = (_first_size(item) for item in items)
    return next((size for size in sizes if size is not None), None)
