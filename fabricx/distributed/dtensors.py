"""Recognition of DTensors without the import of `torch.distributed.tensor`, which a run on one rank does not need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor: each rank stores a part of it, and `full_tensor` gathers it.

    Args:
        value: any object.
    """
    module = sys.modules.get("torch.distributed.tensor")  # without it, no DTensor exists
    return module is not None and isinstance(value, module.DTensor)
