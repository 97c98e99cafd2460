"""Synchronous protocols: each update uses the gradient of a global batch, and workers step in lockstep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.activity.message_counts import MessageCounts
from fabricx.distributed.world import World
from fabricx.parameter_server.gradients import norm_factor
from fabricx.parameter_server.wire.messages import Push, Settings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.exchange import Exchange
from fabricx.parameter_server.worker.protocol import E, WorkerProtocol
from fabricx.parameter_server.worker.pull_timing import PullTiming


class Lockstep(WorkerProtocol[E]):
    """Synchronous protocol.

    Args:
        settings: settings of the exchange.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._clock = 0  # number of updates so far
        self._messages: MessageCounts | None = None  # to the servers, which answer when all workers have sent theirs

    def connect(
        self, world: World, exchange: E, parameters: list[Tensor], optimizers: list[Optimizer], timing: PullTiming
    ) -> None:  # fmt: skip
        super().connect(world, exchange, parameters, optimizers, timing)
        self._messages = MessageCounts(world.key("exchange/lockstep"), world.members, "message to the servers")

    def disconnect(self) -> None:
        if self._messages is not None:
            self._messages.close()
        self._messages = None
        super().disconnect()

    def _count_message(self) -> None:
        """Count a message that all workers send before any of them receives the reply to a later request."""
        assert self._messages is not None
        self._messages.sent += 1

    @contextlib.contextmanager
    def _awaiting_workers(self) -> Iterator[None]:
        """Context of a request that is answered when all workers have sent as many messages as this worker."""
        assert self._messages is not None
        self._messages.awaited = self._messages.sent
        heartbeat.waits_for("a reply of the servers, which wait for the other workers")
        try:
            yield
        finally:
            heartbeat.waits_for("")
            self._messages.awaited = 0

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        super().start_training(step, ranks, module)
        self._clock = step

    @property
    def pushes_parts(self) -> bool:
        return self.servers_step and self.world.size > 1

    def _push_part(self, gradients: Sequence[Tensor | None], *, hold: bool) -> None:
        """Push this worker's part of the update's gradient; with `hold`, the update waits for `ApplyUpdate`."""
        self._count_message()
        self.exchange.push(
            gradients, Push(self._clock, self.world.size, (self.world.rank,), groups=self.groups(), hold=hold)
        )


@final
class WorkerStep(Lockstep[Exchange]):
    """Gradients are summed by the exchange, and each worker steps with the sum.

    Args:
        settings: settings of the exchange.
        several: a window has several backwards, which reach different parameters (manual optimization).
        low_rank: compression by low-rank factors; None for none.
    """

    servers_step = False

    def __init__(self, settings: Settings, *, several: bool, low_rank: LowRank | None) -> None:
        super().__init__(settings)
        self._several = several
        self._low_rank = low_rank

    def backward(self, compute: Callable[[], None], *, closing: bool) -> None:
        earlier = self._set_aside() if self._several else []
        super().backward(compute, closing=closing)
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _set_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Remove gradients that are sums over ranks already, so that the next backward's gradients are separate."""
        earlier = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        self.gradients.clear()
        return earlier

    def exchange_gradient(self) -> bool:
        if self._low_rank is None:
            self._sum()
        else:
            self._low_rank.join(self._sum)
        return True

    def _sum(self) -> None:
        """Replace the gradients that are exchanged by their sums over all workers."""
        carriers = None if self._low_rank is None else self._low_rank.carriers
        self._push_part(self.gradients.all() if carriers is None else [c.grad for c in carriers], hold=False)
        self._clock += 1
        with self._awaiting_workers():
            self.exchange.pull_sums(self._clock)

    def error_feedback(self) -> Any:
        return super().error_feedback() if self._low_rank is None else self._low_rank.state()

    def load_error_feedback(self, feedback: Any) -> None:
        if self._low_rank is None:
            super().load_error_feedback(feedback)
        else:
            self._low_rank.load(feedback)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def finish_update(self, step: int) -> int:
        return step


@final
class ServerStep(Lockstep[Client]):
    """Servers hold the sum until all workers have sent their clipping, and then step.

    Args:
        settings: settings of the servers.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._scales: list[tuple[list[Tensor], float]] = []
        self._limits: list[tuple[list[Tensor], float]] = []
        self._pushed = False
        self._has_whole_weights = False  # complete weights were pulled since the newest update
        # Results of `load_local_state`, until `start_training`:
        self._restored: list[Tensor] | None = None  # the servers' weights, if a worker's weights may lack updates
        self._received: list[Tensor | None] = []  # weights by server to which compressed differences refer

    def exchange_gradient(self) -> bool:
        self.world.barrier()  # an update is certain only when all workers have reached this point
        return True

    def _push(self) -> None:
        """Push this worker's final gradient, once per update."""
        if not self._pushed:
            self._push_part(self.gradients.all(), hold=True)
        self._pushed = True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        clipped = self._check_once(parameters)
        self._push()
        with self._awaiting_workers():
            norm = self.exchange.norm(self._clock, clipped)
        self._scales.append((clipped, norm_factor(norm, max_norm)))
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        self._limits.append((self._check_once(parameters), limit))
        return True

    def _check_once(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        clipped = self.gradients.check_dense(parameters)
        before = {id(parameter) for earlier, _ in (*self._scales, *self._limits) for parameter in earlier}
        if any(id(parameter) in before for parameter in clipped):
            raise ValueError(
                "a gradient is clipped twice in an update, and servers clip once: clip it once, or use "
                "optimizer='worker'"
            )
        return clipped

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self.optimizers.keep_groups(optimizer)

    def finish_update(self, step: int) -> int:
        # The module's optimizer_step may have changed learning rates after the gradient was pushed for its norm.
        groups = self.groups() if self._pushed else None
        self._push()
        self.drop_partial_gradients()
        self._count_message()
        self.exchange.apply(self._clock, self._scales, self._limits, groups)
        self.optimizers.end_update()
        self._scales, self._limits, self._pushed, self._has_whole_weights = [], [], False, False
        self._clock += 1
        with self._awaiting_workers():
            self.timing.pull(self._clock, lambda reply: None)
        return step

    def meet(self) -> None:
        self.timing.settle()
        weights = self.exchange.weights
        if weights.partial and not self._has_whole_weights:  # else a callback may have replaced the module's weights
            weights.pull(self.parameters)
        self._has_whole_weights = True

    def whole_states(self) -> AbstractContextManager[Any]:
        return self.optimizers.holding(self.exchange.remote.optimizers())

    def local_state(self) -> Any:
        self.timing.settle()
        weights, remote = self.exchange.weights, self.exchange.remote
        received = weights.received_weights()
        if not self.world.main_rank:
            return None, None, received
        return remote.optimizers(), remote.weights() if weights.partial else None, received

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        servers, received = self._restored, self._received
        self._restored, self._received, self._has_whole_weights = None, [], False
        differs = any(weights is not None for weights in received)  # this worker's weights from those of the servers
        local = [parameter.detach().clone() for parameter in self.parameters] if differs else []
        if servers is not None:
            self._set_weights(servers)  # the main rank initialises the servers with its parameters
        super().start_training(step, ranks, module)
        self.exchange.weights.begin_differences()
        if differs:
            self._set_weights(local)
            self.exchange.weights.forget_tables()
        self.exchange.weights.set_received_weights(received)

    def _set_weights(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.detach().copy_(value)

    def load_local_state(self, states: Sequence[Any]) -> None:
        optimizers, self._restored, self._received = states[0]
        if optimizers is not None:  # on the main rank, which initialises the servers
            self.optimizers.load(optimizers)
