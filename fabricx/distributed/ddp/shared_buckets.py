"""Averages the gradient buckets of torch's DDP in memory that the ranks of a machine share."""

from __future__ import annotations

import time
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.membership.generations import membership
from fabricx.distributed.shared_memory.group import SharedMemoryGroup, detects_lost_ranks
from fabricx.distributed.world import OPERATION, World

DIRECT: Final = 4  # number of ranks up to which each rank sums whole buckets; more ranks sum a part each
_ALIGNMENT: Final = 64  # bytes


@final
class SharedMemoryAverager:
    """Averages buckets: each rank writes its gradients to its own shared memory, and sums those of all ranks.

    Gradients are summed in the order of ranks at each element, so that the sum does not depend on the layout of
    buckets, and is equal on all ranks to the bit. A rank waits for the others' parts of a bucket only when its next
    bucket is ready, or if there is none, so that ranks need not reach a bucket at the same time.

    A bucket that is larger than a slot is averaged in pieces: torch's DDP begins with a single bucket of all gradients.
    There are two slots per rank, used in turn. A rank publishes a piece after it has read the previous piece of all
    ranks. A signal for piece k therefore means that piece k - 1 was read, and the slot of k - 1 may be written.

    Args:
        ranks: all of them are on this machine, and call this.
        room: bytes of a slot, at least; the same on all ranks.
        at_once: complete each bucket before the next: with `static_graph`, DDP's first step numbers no bucket as last.

    Raises:
        PeerLost: a rank has died.
    """

    def __init__(self, ranks: World, room: int, *, at_once: bool = False) -> None:
        assert ranks.store is not None
        self._ranks, self._rank, self._size = ranks, ranks.rank, ranks.size
        self._room = max(1, -(-room // _ALIGNMENT)) * _ALIGNMENT
        self._turn, self._at_once = 0, at_once
        self._pending: tuple[Tensor, list[Tensor]] | None = None  # newest piece, and the ranks' parts of it
        self._bucket: tuple[torch.futures.Future[Tensor], Tensor] | None = None  # bucket that ends with this piece
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self.waited_s = 0.0
        # A rank may set up several times in a generation; the number is the same on all ranks.
        number = ranks.store.add(ranks.key(f"gradients/{ranks.generation}/rank {ranks.rank}"), 1)
        key = ranks.key(f"gradients/{ranks.generation}/{number}")
        # Connections of the generation end when any of its ranks dies, and so does a wait.
        with membership().opening(), detects_lost_ranks(ranks):
            self._group = SharedMemoryGroup(
                ranks.store, key, ranks.rank, ranks.size, torch.uint8, 2 * self._room, ranks.generation, ranks.secret,
                int(OPERATION.total_seconds()), ranks.members,
            )  # fmt: skip

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Publish a bucket, and complete the previous bucket.

        Args:
            bucket: bucket of torch's DDP communication hook.

        Returns:
            Future of the bucket's buffer, which is complete when the last bucket was averaged.

        Raises:
            PeerLost: a rank has died.
        """
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with detects_lost_ranks(self._ranks):
            for piece in buffer.split(self._room // buffer.element_size()):
                self._complete()
                slots = self._slots(piece)
                torch.mul(piece, 1.0 / self._size, out=slots[self._rank])
                self._group.signal()
                self._pending = piece, slots
            self._bucket = future, buffer
            if self._at_once or bucket.is_last():
                self._complete()
        return future

    def close(self) -> None:
        """End the connections to the other ranks, and release the memory."""
        self._pending = self._bucket = None
        self._group.close()
        self._group.vectors.clear()
        self._views.clear()

    def _slots(self, piece: Tensor) -> list[Tensor]:
        """Return the memory for a piece by rank, as vectors like the piece."""
        key = (self._turn, piece.dtype, piece.numel())
        if key not in self._views:
            start = self._turn * self._room
            stop = start + piece.numel() * piece.element_size()
            self._views[key] = [vector[start:stop].view(piece.dtype) for vector in self._group.vectors]
        self._turn = 1 - self._turn
        return self._views[key]

    def _complete(self) -> None:
        """Wait for the other ranks' parts of the newest piece, and sum them."""
        if self._pending is None:
            return
        (piece, slots), self._pending = self._pending, None
        began = time.perf_counter()
        self._group.await_signals()
        self.waited_s += time.perf_counter() - began
        if self._size <= DIRECT:
            _sum(slots, piece)
        else:
            bounds = [len(piece) * rank // self._size for rank in range(self._size + 1)]
            begin, end = bounds[self._rank], bounds[self._rank + 1]
            _sum([slot[begin:end] for slot in slots], piece[begin:end])
            slots[self._rank][begin:end] = piece[begin:end]
            self._group.signal()
            self._group.await_signals()
            for slot, start, stop in zip(slots, bounds, bounds[1:], strict=False):
                piece[start:stop] = slot[start:stop]
        if self._bucket is not None:
            (future, buffer), self._bucket = self._bucket, None
            future.set_result(buffer)


def average_in_shared_memory(averager: SharedMemoryAverager, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket over all ranks, in place.

    Args:
        averager: state of this rank.
        bucket: bucket of torch's DDP communication hook.

    Returns:
        Future of the bucket's buffer.
    """
    return averager.average(bucket)


# DDP compares a hook's annotations with types, and annotations are strings in this module.
average_in_shared_memory.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


def _sum(parts: list[Tensor], out: Tensor) -> None:
    """Sum vectors in their order."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
