"""Sums over the workers of one machine without a server: each sums a part in shared memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from torch import Tensor

from fabricx.distributed.world import World
from fabricx.errors import ServerLost
from fabricx.parameter_server.server.update_rule import add_up, joined
from fabricx.parameter_server.wire.channel import LOST
from fabricx.parameter_server.wire.messages import Counts
from fabricx.parameter_server.wire.partition import divide
from fabricx.parameter_server.wire.shm_group import RemappableBuffer, SharedMemoryGroup
from fabricx.parameter_server.worker.buffers import ExchangeBuffers, Filled, dtype_of, settle_sums, watch


@final
class SharedMemorySum:
    """What `Client` is where there are servers, for workers that sum by themselves.

    Args:
        world: all of them.
        key: of theirs in the store.
        parameters: the same on all workers, in the same order.
        views: gradients may stay in the shared memory.
        tables: numbers of the parameters of whose gradients only some rows are there.
        weights: have memory for all weights too.
    """

    def __init__(
        self, world: World, key: str, parameters: Sequence[Tensor], *, views: bool, tables: frozenset[int],
        weights: bool = False,
    ) -> None:  # fmt: skip
        self.hears = True
        self.waited_s = self.pushed_s = 0.0
        self.brought = 0  # no weights come: they are in one memory
        self.pushes: deque[tuple[int, int, float]] = deque(maxlen=0)  # nobody is sent anything
        rank, size = world.rank, world.size
        self._parameters, self._rank, self._size = list(parameters), rank, size
        [self.shard] = divide([parameter.shape for parameter in parameters], 1, by_row=tables)
        self.dtype = dtype_of(parameters)
        with others_are_there():
            key = f"{key}/{world.generation}"
            self._mesh = SharedMemoryGroup(
                world.store, key, rank, size, self.dtype, self.shard.room, world.generation, world.secret
            )
            self.weights = RemappableBuffer(self._mesh, self.dtype, self.shard.size) if weights else None
        self.slots = self._mesh.vectors
        self._slot = Slot(self.slots[rank])
        self._boxes = ExchangeBuffers(self._slot, self.shard, self._parameters, None, views=views)
        self._filled: dict[int, Filled | None] = {}
        begin, end = (self.shard.dense * place // size for place in (rank, rank + 1))
        self._own = [slot[begin:end] for slot in self.slots]  # what this worker sums

    def watch(self) -> Callable[[], None]:
        """Let gradients go as soon as they are complete, while `hears`; returns what ends that."""
        return watch(self._parameters, [self.shard], self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.hears:
            self._boxes.put(number, parameter)

    def begin(self, *anything: Any, **more: Any) -> None:
        """Do nothing: there is nobody who would have to know the optimizers."""

    def push(self, gradients: Sequence[Tensor | None], **anything: Any) -> None:
        """Show the others this worker's gradients, by parameter; waits for nothing."""
        begun = time.perf_counter()
        empty = all(gradient is None for gradient in gradients)
        filled = self._filled[self._rank] = None if empty else self._boxes.fill(gradients)
        with others_are_there():
            self._mesh.tell(filled)
        self.pushed_s += time.perf_counter() - begun

    def hear(self) -> list[Filled | None]:
        """Wait for what all have pushed, by rank; None is of those without a gradient."""
        begun = time.perf_counter()
        with others_are_there():
            heard = {**self._mesh.hear(), self._rank: self._filled[self._rank]}
        self.waited_s += time.perf_counter() - begun
        return [heard[rank] for rank in range(self._size)]

    def gather(self, value: float) -> list[float]:
        """Return a number of each worker, by rank."""
        with others_are_there():
            self._mesh.tell(value)
            heard = {**self._mesh.hear(), self._rank: value}
        return [heard[rank] for rank in range(self._size)]

    def meet(self) -> None:
        """Wait for all workers."""
        begun = time.perf_counter()
        self.gather(0.0)
        self.waited_s += time.perf_counter() - begun

    def pull_sums(self, version: int) -> None:
        """Let the parameters' gradients be the sums of all workers'; None where nobody had one."""
        begun = time.perf_counter()
        with others_are_there():
            self._filled |= self._mesh.hear()
            full = [rank for rank in range(self._size) if self._filled[rank] is not None]
            if full and len(self._own[0]):
                add_up([self._own[rank] for rank in full], self._own)
            rows = self._rows()
            self._mesh.tell(None)
            self._mesh.hear()
        self.waited_s += time.perf_counter() - begun
        missing = [filled.missing for filled in self._filled.values() if filled is not None]
        everything = frozenset(range(len(self.shard.pieces)))
        nowhere = frozenset.intersection(*missing) if missing else everything
        settle_sums(self._parameters, [self._boxes], [nowhere], [rows])

    def _rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the sums of rows, by parameter; each worker does this for all of them, since they are few."""
        parts = []
        for rank, filled in sorted(self._filled.items()):
            rows = {} if filled is None else filled.rows
            parts.append({n: self.shard.rows_in(self.slots[rank], n, count) for n, count in rows.items()})
        return {self.shard.rows[n].parameter: (ids.long(), values) for n, (ids, values) in joined(parts).items()}

    def counts(self) -> list[Counts]:
        """Return nothing: there are no servers."""
        return []

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors that others have seen, and that were summed from others."""
        return self._slot.posted, self._slot.posted

    def close(self, *, done: bool = True) -> None:
        """Leave the others."""
        if self.weights is not None:
            self.weights.close()
        self._mesh.close()


@final
class Slot:
    """A vector that others see: nothing has to travel."""

    def __init__(self, vector: Tensor) -> None:
        self.inbox = self.outbox = vector
        self.posted = 0

    def post(self, start: int, stop: int) -> None:
        """Count the bytes."""
        self.posted += stop - start


@contextlib.contextmanager
def others_are_there() -> Iterator[None]:
    """Raise a `ServerLost` where another worker is found to be gone."""
    try:
        yield
    except LOST as error:
        raise ServerLost("another worker has gone, and its gradients with it") from error
