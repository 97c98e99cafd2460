"""Shared weights on a machine without servers: each worker sums and steps a part in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.shared_memory.group import RemappableBuffer
from fabricx.distributed.world import World
from fabricx.parameter_server.gradients import add_up, norm_factor
from fabricx.parameter_server.optimizer_parts import Hyperparameters, ServerOptimizers, pack, sliced
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.wire.partition import Shard, divide
from fabricx.parameter_server.worker.buffers import dtype_of
from fabricx.parameter_server.worker.lockstep import Lockstep
from fabricx.parameter_server.worker.pull_timing import PullTiming
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum, detects_dead_workers

Span = tuple[int, int]


def check_shareable(parameters: Sequence[Tensor]) -> None:
    """Check that workers can keep parameters in a vector in main memory.

    Args:
        parameters: parameters of all optimizers.

    Raises:
        ValueError: they have several dtypes, or are on another device.
    """
    if len({(p.dtype, p.device.type) for p in parameters} | {(dtype_of(parameters), "cpu")}) > 1:
        raise ValueError(
            "servers=0 with optimizer='server' keeps weights in main memory, all of one dtype: set servers=1"
        )


@final
class SharedWeights(Lockstep[SharedMemorySum]):
    """Protocol for weights in memory that all workers share while they train.

    A worker has the optimizer state of its own part only (ZeRO stage 1: Rajbhandari et al., SC 2020). When all workers
    meet, for a validation or a checkpoint, each has private weights that it may change; when training continues, the
    weights of the main rank are used.

    Args:
        settings: settings of the exchange.
        whole: a parameter is stepped by a single worker.
    """

    def __init__(self, settings: Settings, *, whole: bool) -> None:
        super().__init__(settings)
        self._whole = whole
        self._private: list[Tensor] = []  # original memory of the parameters
        self._pieces: list[Tensor] = []  # this worker's part of the parameters
        self._spans: list[Span] = []  # positions of the pieces in the shared memory
        self._stepping: list[Optimizer] = []
        self._summed = False

    def connect(
        self, world: World, exchange: SharedMemorySum, parameters: list[Tensor], optimizers: list[Optimizer],
        timing: PullTiming,
    ) -> None:  # fmt: skip
        super().connect(world, exchange, parameters, optimizers, timing)
        self._private = [parameter.data for parameter in parameters]
        for parameter, (start, stop) in zip(parameters, _spans(parameters), strict=True):
            view = self._memory.vector[start:stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view

    @property
    def _memory(self) -> RemappableBuffer:
        assert self.exchange.memory is not None
        return self.exchange.memory

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        self._shard = self._divided(self.world.size)[self.world.rank]
        offsets = [start for start, _ in _spans(self.parameters)]
        packed, self._pieces = sliced(self.optimizers.optimizers, self.parameters, self._shard)
        self._stepping = packed.unpack(self._pieces)
        self._hyperparameters = Hyperparameters(self._stepping, packed.pushed)
        self._spans = [
            (offsets[piece.parameter] + piece.start, offsets[piece.parameter] + piece.stop)
            for piece in self._shard.pieces
        ]
        for piece, (start, stop) in zip(self._pieces, self._spans, strict=True):
            piece.data = self._memory.vector[start:stop].view(piece.shape)
        self.optimizers.forget_moments()
        self._summed = False

    @property
    def shares_update(self) -> bool:
        return self._summed

    def _divided(self, workers: int) -> list[Shard]:
        return divide([parameter.shape for parameter in self.parameters], workers, whole=self._whole)

    def disconnect(self) -> None:
        for parameter, private in zip(self.parameters, self._private, strict=True):
            private.copy_(parameter.data)
            parameter.data = private
        self._private, self._pieces = [], []
        super().disconnect()

    def before_step(self) -> None:
        if self._memory.private:
            with detects_dead_workers():
                self._memory.share()

    def meet(self) -> None:
        if not self._memory.private:
            self._memory.unshare()

    # -- one step ------------------------------------------------------------------------------------------------

    def exchange_gradient(self) -> bool:
        self.before_step()  # for a worker without a sample, which has not called it
        self.exchange.meet()
        return True

    def _sum(self) -> None:
        """Sum this worker's part of all final gradients, once per update."""
        if self._summed:
            return
        self.exchange.push(self.gradients.all())
        self.exchange.statistics.pulls += 1  # from now on, workers may change the weights
        filled = self.exchange.await_pushes()
        slots = self.exchange.slots
        number_of = {piece.parameter: number for number, piece in enumerate(self.exchange.shard.pieces)}
        for piece, part, (start, stop) in zip(self._pieces, self._shard.pieces, self._spans, strict=True):
            number = number_of[part.parameter]
            full = [slot[start:stop] for slot, push in zip(slots, filled, strict=True)
                    if push is not None and number not in push.missing]  # fmt: skip
            total = slots[self.world.rank][start:stop]
            if full:
                add_up(full, [total])
            piece.grad = total.view(piece.shape) if full else None
        self._summed = True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        gradients = self._gradients_of(parameters)
        squares = self.exchange.gather(sum(float(gradient.square().sum()) for gradient in gradients))
        norm = sum(squares) ** 0.5
        if gradients and (factor := norm_factor(norm, max_norm)) != 1.0:
            torch._foreach_mul_(gradients, factor)
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        for gradient in self._gradients_of(parameters):
            gradient.clamp_(-limit, limit)
        return True

    def _gradients_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        clipped = self.gradients.check_dense(parameters)
        self._sum()
        wanted = {id(parameter) for parameter in clipped}
        return [
            piece.grad for piece, part in zip(self._pieces, self._shard.pieces, strict=True)
            if piece.grad is not None and id(self.parameters[part.parameter]) in wanted
        ]  # fmt: skip

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self.optimizers.keep_groups(optimizer)

    def finish_update(self, step: int) -> int:
        self._sum()
        self._summed = False
        self.drop_partial_gradients()
        self._hyperparameters.apply(self.optimizers.groups())
        self.optimizers.end_update()
        for stepping in self._stepping:
            stepping.step()
        self.exchange.meet()
        return step

    def whole_states(self) -> AbstractContextManager[Any]:
        return self.optimizers.holding(self.world.gather_objects(self.local_state()))

    def local_state(self) -> ServerOptimizers:
        packed = pack(self._stepping, self._pieces, pushed=self._hyperparameters.pushed)
        return ServerOptimizers(self._shard, packed)

    def load_local_state(self, states: Sequence[Any]) -> None:
        self.optimizers.load(states)


def _spans(parameters: Iterable[Tensor]) -> list[Span]:
    """Return the position of each parameter in the concatenation of all parameters."""
    spans, begin = [], 0
    for parameter in parameters:
        spans.append((begin, begin + parameter.numel()))
        begin += parameter.numel()
    return spans
