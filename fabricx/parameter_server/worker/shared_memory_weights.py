"""The protocol of shared weights on one machine: each worker sums and steps a part in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.distributed.world import World
from fabricx.parameter_server.optimizer_parts import (
    Hyperparameters,
    Remembered,
    ServerOptimizers,
    pack,
    sliced,
    take_in,
)
from fabricx.parameter_server.server.update_rule import add_up
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.wire.partition import Shard, divide
from fabricx.parameter_server.wire.shm_group import RemappableBuffer
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.protocol import Lockstep
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum, others_are_there

Span = tuple[int, int]


@final
class Sharing(Lockstep):
    """While training goes on, the parameters lie in memory that all workers see.

    A worker has the optimizers' moments of its own part only (ZeRO stage 1: Rajbhandari et al., SC 2020). Where all
    meet, for a validation or a checkpoint, each has weights of its own, and may do with them what it likes; when
    training goes on, those of the main rank are everybody's.

    Args:
        settings: of the exchange.
        whole: a parameter is stepped by one worker.
    """

    def __init__(self, settings: Settings, *, whole: bool) -> None:
        super().__init__(settings)
        self._whole = whole
        self._own: list[Tensor] = []  # where the parameters were
        self._pieces: list[Tensor] = []  # of this worker
        self._spans: list[Span] = []  # where they lie
        self._stepping: list[Optimizer] = []
        self._summed = False

    @property
    def _neighbours(self) -> SharedMemorySum:
        return cast(SharedMemorySum, self._client)

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        if len({(parameter.dtype, parameter.device.type) for parameter in parameters} | {(client.dtype, "cpu")}) > 1:
            raise ValueError(
                "servers=0 with optimizer='server' keeps weights in main memory, all of one type: say servers=1"
            )
        super().begin(world, client, parameters, optimizers)
        self._own = [parameter.data for parameter in parameters]
        for parameter, (start, stop) in zip(parameters, _spans(parameters), strict=True):
            view = self._memory.vector[start:stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    @property
    def _memory(self) -> RemappableBuffer:
        assert self._neighbours.weights is not None
        return self._neighbours.weights

    def starts(self, step: int) -> None:
        self._shard = self._divided(self.world.size)[self.world.rank]
        offsets = [start for start, _ in _spans(self._parameters)]
        packed, self._pieces = sliced(self._optimizers, self._parameters, self._shard)
        self._stepping = packed.unpack(self._pieces)
        self._hyperparameters = Hyperparameters(self._stepping, packed.given)
        self._spans = [
            (offsets[piece.parameter] + piece.start, offsets[piece.parameter] + piece.stop)
            for piece in self._shard.pieces
        ]
        for piece, (start, stop) in zip(self._pieces, self._spans, strict=True):
            piece.data = self._memory.vector[start:stop].view(piece.shape)
        self.forget_moments()
        self._summed = False

    def _divided(self, workers: int) -> list[Shard]:
        return divide([parameter.shape for parameter in self._parameters], workers, whole=self._whole)

    def end(self) -> None:
        for parameter, own in zip(self._parameters, self._own, strict=True):
            own.copy_(parameter.data)
            parameter.data = own
        self._own, self._pieces = [], []
        super().end()

    def before_step(self) -> None:
        if self._memory.apart:
            with others_are_there():
                self._memory.come_together()

    def meet(self) -> None:
        if not self._memory.apart:
            self._memory.go_apart()

    # -- one step ------------------------------------------------------------------------------------------------

    def complete(self) -> bool:
        self.before_step()  # if this worker had nothing to compute
        self._neighbours.meet()
        return True

    def _sum(self) -> None:
        """Sum this worker's part, once nobody will change a gradient any more."""
        if self._summed:
            return
        self._neighbours.push(self.gradients())
        filled = self._neighbours.hear()
        slots = self._neighbours.slots
        number_of = {piece.parameter: number for number, piece in enumerate(self._neighbours.shard.pieces)}
        for piece, part, (start, stop) in zip(self._pieces, self._shard.pieces, self._spans, strict=True):
            number = number_of[part.parameter]
            full = [slot[start:stop] for slot, one in zip(slots, filled, strict=True)
                    if one is not None and number not in one.missing]  # fmt: skip
            total = slots[self.world.rank][start:stop]
            if full:
                add_up(full, [total])
            piece.grad = total.view(piece.shape) if full else None
        self._summed = True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        own = self._gradients_of(parameters)
        squares = self._neighbours.gather(sum(float(gradient.square().sum()) for gradient in own))
        norm = sum(squares) ** 0.5
        if own and norm + 1e-6 > max_norm:  # as torch's clip_grad_norm_ does
            torch._foreach_mul_(own, max_norm / (norm + 1e-6))
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        for gradient in self._gradients_of(parameters):
            gradient.clamp_(-limit, limit)
        return True

    def _gradients_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        clipped = self.check_dense(parameters)
        self._sum()
        wanted = {id(parameter) for parameter in clipped}
        return [
            piece.grad for piece, part in zip(self._pieces, self._shard.pieces, strict=True)
            if piece.grad is not None and id(self._parameters[part.parameter]) in wanted
        ]  # fmt: skip

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return None

    def updated(self, step: int) -> int:
        self._sum()
        self._summed = False
        self.forget_part()
        self._hyperparameters.apply(self.groups())
        for stepping in self._stepping:
            stepping.step()
        self._neighbours.meet()
        return step

    @contextmanager
    def whole_states(self, optimizers: list[Optimizer]) -> Iterator[None]:
        remembered = Remembered(optimizers)
        self.take_own(self.world.gather_objects(self.own()))
        yield
        self.forget_moments()
        remembered.restore()

    def own(self) -> ServerOptimizers:
        packed = pack(self._stepping, self._pieces, given=self._hyperparameters.given)
        return ServerOptimizers(self._shard, packed)

    def take_own(self, owns: Sequence[Any]) -> None:
        take_in(self._optimizers, self._parameters, owns)


def _spans(parameters: Iterable[Tensor]) -> list[Span]:
    """Return where each parameter lies in a vector of all."""
    found, begin = [], 0
    for parameter in parameters:
        found.append((begin, begin + parameter.numel()))
        begin += parameter.numel()
    return found
