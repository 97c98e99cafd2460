"""Sums over the workers of a machine without servers: each worker sums a part in shared memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

from torch import Tensor

from fabricx.distributed.shared_memory.group import RemappableBuffer, SharedMemoryGroup
from fabricx.distributed.world import World
from fabricx.errors import ServerLost
from fabricx.parameter_server.gradients import add_up, merge_rows
from fabricx.parameter_server.wire.link import LINK_ERRORS
from fabricx.parameter_server.wire.messages import Push
from fabricx.parameter_server.wire.partition import divide
from fabricx.parameter_server.worker.buffers import (
    ExchangeBuffers,
    Filled,
    dtype_of,
    write_summed_gradients,
)
from fabricx.parameter_server.worker.exchange import WHOLE, Clip, Exchange, ExchangeStatistics
from fabricx.parameter_server.worker.gradient_hooks import register_grad_hooks
from fabricx.parameter_server.worker.remote_state import RemoteState


@final
class SharedMemorySum(Exchange):
    """Exchange without servers: the workers of a machine sum gradients in shared memory.

    Args:
        world: the workers.
        key: key of the group in the store.
        parameters: the same on all workers, in the same order.
        views: gradients may be views of the shared memory.
        tables: numbers of the parameters with sparse gradients.
        memory: also allocate shared memory for all weights.

    Attributes:
        dtype: data type of the shared vectors.
        shard: all parameters, as a single part.
        slots: shared vectors of gradients, by rank.
        memory: shared vector of weights, if requested.
    """

    def __init__(
        self, world: World, key: str, parameters: Sequence[Tensor], *, views: bool, tables: frozenset[int],
        memory: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(RemoteState.none(), ExchangeStatistics())
        rank, size = world.rank, world.size
        self._parameters, self._rank, self._size = list(parameters), rank, size
        [self.shard] = divide([parameter.shape for parameter in parameters], 1, by_row=tables)
        self.dtype = dtype_of(parameters)
        with detects_dead_workers():
            key = f"{key}/{world.generation}"
            try:
                self._group = SharedMemoryGroup(
                    world.store, key, rank, size, self.dtype, self.shard.room, world.generation, world.secret,
                    ranks_of_run=world.members,
                )  # fmt: skip
            except ValueError as error:
                raise ValueError(f"servers=0: {error}; set servers=1, or use strategy=ddp") from error
            self.memory = RemappableBuffer(self._group, self.dtype, self.shard.size) if memory else None
        self.slots = self._group.vectors
        self._slot = Slot(self.slots[rank])
        self._buffers = ExchangeBuffers(self._slot, self.shard, self._parameters, None, views=views)
        self._filled: dict[int, Filled | None] = {}
        begin, end = (self.shard.dense * number // size for number in (rank, rank + 1))
        self._blocks = [slot[begin:end] for slot in self.slots]  # the part that this worker sums

    def register_grad_hooks(self) -> Callable[[], None]:
        return register_grad_hooks(self._parameters, [self.shard], self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.sends_early:
            self._buffers.post_piece(number, parameter)

    def push(
        self, gradients: Sequence[Tensor | None], push: Push = WHOLE, *, clips: Sequence[Clip] = (),
        answered: bool = False,
    ) -> bool:  # fmt: skip
        """Publish this worker's gradients, without waiting; workers without servers need no description of them.

        Args:
            gradients, push, clips, answered: as in `Exchange.push`.
        """
        begun = time.perf_counter()
        empty = all(gradient is None for gradient in gradients)
        filled = self._filled[self._rank] = None if empty else self._buffers.post_gradients(gradients)
        with detects_dead_workers():
            self._group.send_all(filled)
        self.statistics.pushed_s += time.perf_counter() - begun
        return True

    def await_pushes(self) -> list[Filled | None]:
        """Wait for the pushes of all workers, by rank; None for a worker without gradients."""
        begun = time.perf_counter()
        with detects_dead_workers():
            filled = {**self._group.recv_all(), self._rank: self._filled[self._rank]}
        self.statistics.waited_s += time.perf_counter() - begun
        return [filled[rank] for rank in range(self._size)]

    def gather(self, value: float) -> list[float]:
        """Gather a number of each worker, by rank.

        Args:
            value: this worker's value.
        """
        with detects_dead_workers():
            self._group.send_all(value)
            values = {**self._group.recv_all(), self._rank: value}
        return [values[rank] for rank in range(self._size)]

    def meet(self) -> None:
        """Wait for all workers."""
        begun = time.perf_counter()
        self.gather(0.0)
        self.statistics.waited_s += time.perf_counter() - begun

    def pull_sums(self, version: int) -> None:
        begun = time.perf_counter()
        with detects_dead_workers():
            self._filled |= self._group.recv_all()
            full = [rank for rank in range(self._size) if self._filled[rank] is not None]
            if full and len(self._blocks[0]):
                add_up([self._blocks[rank] for rank in full], self._blocks)
            rows = self._rows()
            self._group.send_all(None)
            self._group.recv_all()
        self.statistics.waited_s += time.perf_counter() - begun
        missing = [filled.missing for filled in self._filled.values() if filled is not None]
        all_pieces = frozenset(range(len(self.shard.pieces)))
        absent = frozenset.intersection(*missing) if missing else all_pieces
        write_summed_gradients(self._parameters, [self._buffers], [absent], [rows])

    def _rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the sums of rows by parameter; each worker sums all rows, since there are few."""
        parts = []
        for rank, filled in sorted(self._filled.items()):
            rows = {} if filled is None else filled.rows
            parts.append({n: self.shard.rows_in(self.slots[rank], n, count) for n, count in rows.items()})
        return {self.shard.rows[n].parameter: (ids.long(), values) for n, (ids, values) in merge_rows(parts).items()}

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients that this worker has published, as both sent and received bytes."""
        return self._slot.posted, self._slot.posted

    def close(self, *, done: bool = True) -> None:
        if self.memory is not None:
            self.memory.close()
        self._group.close()


@final
class Slot:
    """A shared vector with the link interface of `Vectors`; nothing is sent.

    Args:
        vector: vector in shared memory.
    """

    def __init__(self, vector: Tensor) -> None:
        self.inbox = self.outbox = vector
        self.posted = 0

    def post(self, start: int, stop: int) -> None:
        """Count the bytes.

        Args:
            start, stop: positions in bytes.
        """
        self.posted += stop - start


@contextlib.contextmanager
def detects_dead_workers() -> Iterator[None]:
    """Context that converts errors of the group.

    Raises:
        ServerLost: another worker has died.
    """
    try:
        yield
    except LINK_ERRORS as error:
        raise ServerLost("another worker has died, and its gradients are lost") from error
