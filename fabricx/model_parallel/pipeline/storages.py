"""Storages of tensors, which views have in common, for observations of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fabricx.model_parallel.nested import leaves
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


def storage_of(tensor: Tensor) -> int:
    """Return a number that views of a tensor have in common.

    Args:
        tensor: any.
    """
    try:
        return int(_local(tensor).untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of several tensors
        return id(tensor)


def written_storages(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages to which an operator writes.

    Args:
        func: operator of torch.
        args, kwargs: its arguments.
    """
    if not func._schema.is_mutable:
        return set()
    return {
        storage_of(leaf)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for _, leaf in leaves(args[number] if number < len(args) else kwargs.get(argument.name))
        if isinstance(leaf, Tensor)
    }


def kept_alive(tensor: Tensor) -> Any:
    """Return an object that keeps a tensor's storage alive, so that no other storage has its number.

    Args:
        tensor: any.
    """
    try:
        return _local(tensor).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def same_values(tensor: Tensor, before: Tensor | None) -> bool:
    """Return whether a tensor has the values of a copy.

    Args:
        tensor: of any shape.
        before: the copy; None without a copy, which counts as the same.
    """
    return before is None or (tensor.shape == before.shape and torch.equal(tensor, before))


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor
