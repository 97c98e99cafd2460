"""A sum of vectors that ranks send encoded."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.compression.codecs import Codec


@final
class EncodedSum:
    """Replaces a vector by the sum of the vectors of all ranks, like an asynchronous all-reduce.

    All ranks receive the encoded vectors of all others and add them in the same order, so that the sums are equal.

    Args:
        vector: this rank's, shape [elements]; the codec keeps its encoding error, and it is changed until `wait`.
        codec: this rank's codec of the vector; its bytes need no scale.
        group: process group.
        size: ranks of the group.
    """

    def __init__(self, vector: Tensor, codec: Codec, group: Any, size: int) -> None:
        self._vector, self._codec = vector, codec
        room = torch.empty(codec.bytes(len(vector)), dtype=torch.uint8, device=vector.device)
        codec.encode(vector, room)
        self._rooms = [torch.empty_like(room) for _ in range(size)]
        self._work: Any = dist.all_gather(self._rooms, room, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the vectors of all ranks, and write their sum to the vector."""
        self._work.wait()
        self._vector.zero_()
        for room in self._rooms:
            self._vector.add_(self._codec.decode(room, len(self._vector), 1.0, self._vector.dtype))
