"""DTensors, without the import of `torch.distributed.tensor`, which a run on one rank does not need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor: each rank stores a part of it, and `full_tensor` gathers it.

    Args:
        value: any object.
    """
    module = sys.modules.get("torch.distributed.tensor")  # without it, no DTensor exists
    return module is not None and isinstance(value, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor on this rank, in the same memory and without a graph.

    Args:
        tensor: a DTensor or an ordinary tensor.
    """
    values = tensor.detach()
    return values.to_local() if is_dtensor(values) else values


def with_part(like: DTensor, part: Tensor) -> DTensor:
    """Return a DTensor with the shape and division of another, and other elements on this rank.

    Args:
        like: the other DTensor.
        part: elements on this rank; the result has the same memory.
    """
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
