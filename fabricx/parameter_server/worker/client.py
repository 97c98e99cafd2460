"""A worker's client of all parameter servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from fabricx.parameter_server.optimizer_parts import flat_part, sliced
from fabricx.parameter_server.wire.connecting import Store
from fabricx.parameter_server.wire.messages import (
    ApplyUpdate,
    Groups,
    Push,
    PushReply,
    ReadNorm,
    RuleState,
    ServerInit,
    Settings,
)
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import ExchangeBuffers, Filled
from fabricx.parameter_server.worker.exchange import WHOLE, Clip, Exchange, ExchangeStatistics
from fabricx.parameter_server.worker.gradient_hooks import register_grad_hooks
from fabricx.parameter_server.worker.lease_requests import LeaseRequests
from fabricx.parameter_server.worker.remote_state import RemoteState
from fabricx.parameter_server.worker.server_locator import ServerLocator
from fabricx.parameter_server.worker.servers import Servers, VectorOptions
from fabricx.parameter_server.worker.weight_pulls import WeightPulls


@final
class Client(Exchange):
    """Exchange through servers: pushes gradients to all servers, and pulls weights or sums of gradients.

    Args:
        store: store in which servers publish their addresses.
        prefix: prefix of the run's keys.
        secret: key of the run.
        worker: number of this worker.
        parameters: the same on all workers, in the same order.
        servers: number of servers.
        options: contents of the vectors; None for the defaults.
        over_gloo: use gloo also for servers on this machine.
        generation: generation of workers in lockstep; None for workers at their own pace.

    Attributes:
        servers: connections to all servers.
        weights: pulls.
        leases: requests for leases of the data.
    """

    def __init__(
        self, store: Store, prefix: str, secret: bytes, worker: int, parameters: Sequence[Tensor], servers: int,
        options: VectorOptions | None = None, *, over_gloo: bool = False, generation: int | None = 0,
    ) -> None:  # fmt: skip
        statistics = ExchangeStatistics()
        self._locator = ServerLocator(store, prefix, secret, over_gloo=over_gloo)
        self._worker = worker
        self._count = 0  # number of pushes
        self._ordered = False  # all servers receive updates in the same order
        self.servers = Servers(self._locator, worker, generation, parameters, servers, options or VectorOptions())
        self.weights = WeightPulls(self.servers, statistics)
        self.leases = LeaseRequests(self.servers, statistics)
        super().__init__(RemoteState(self.servers.parameters, self.servers.shards, self.servers.request), statistics)

    def register_grad_hooks(self) -> Callable[[], None]:
        return register_grad_hooks(self.servers.parameters, self.servers.shards, self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.sends_early:
            self.servers.buffers[server].post_piece(number, parameter)

    def begin(
        self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int,
        *, rule: tuple[dict[str, list[Tensor]], int] | None = None, error_feedback: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        servers = self.servers
        self._locator.restarts = bool(settings.snapshot_every)
        self._ordered = settings.orders_updates and len(servers.shards) > 1
        self.weights.begun_at(version)
        if self._worker:
            return
        for number, shard in enumerate(servers.shards):
            copies, pieces = sliced(optimizers or [], servers.parameters, shard)
            stepped = None if optimizers is None else copies
            state = None
            if rule is not None:
                state = RuleState({name: flat_part(tensors, shard) for name, tensors in rule[0].items()}, rule[1])
            feedback = error_feedback[number] if error_feedback else None
            servers.request(
                number, ServerInit(settings, stepped, pieces, shard, servers.dtype, version, state, feedback)
            )

    # -- gradients ------------------------------------------------------------------------------------------------

    def push(
        self, gradients: Sequence[Tensor | None], push: Push = WHOLE, *, clips: Sequence[Clip] = (),
        answered: bool = False,
    ) -> bool:  # fmt: skip
        """Push gradients to all servers; see `Exchange.push`. Without any gradient, the leases count as complete.

        If dead servers are restarted, the server that grants leases receives the push last, when all other servers have
        confirmed it: they then have every lease that counts as complete. If this worker dies before that, the lease is
        granted again, and servers that have its gradient ignore the second push. Otherwise this does not wait, unless
        pushes are `answered` (see `Settings.may_drop`) or compressed: a link may have been lost since the lease was
        granted, and the error feedback must not include a gradient that a server does not use.

        Args:
            gradients, push, clips, answered: as in `Exchange.push`.
        """
        begun = time.perf_counter()
        empty = all(gradient is None for gradient in gradients)
        clipped = [(kind, self.servers.numbers(parameters), limit) for kind, parameters, limit in clips]
        self.weights.finish()
        if self._ordered and not self.leases.take_turn().content:
            return False  # the gradient would not be used, and the lease is granted again
        restarts = self._locator.restarts
        answered = answered or (restarts and self.servers.options.compression is not None)
        first, *others = self.servers.buffers
        for number, buffers in enumerate(others, 1):
            self._push_to(buffers, gradients, replace(
                push, empty=empty, clips=[(kind, pieces[number], limit) for kind, pieces, limit in clipped],
                confirm=restarts, logged=None,
            ))  # fmt: skip
        for buffers in others if restarts else ():
            self._await_confirmation(buffers, empty=empty)
        self._push_to(first, gradients, replace(
            push, empty=empty, clips=[(kind, pieces[0], limit) for kind, pieces, limit in clipped], confirm=answered,
        ))  # fmt: skip
        used = self._await_confirmation(first, empty=empty) if answered else True
        self.statistics.pushed_s += time.perf_counter() - begun
        self._count += 1
        self.statistics.pushes.append((self._worker, self._count, time.monotonic()))
        return used

    def _push_to(self, buffers: ExchangeBuffers[Channel], gradients: Sequence[Tensor | None], push: Push) -> None:
        """Push gradients to a server; `push` lacks the description of the vector."""
        filled = Filled() if push.empty else buffers.post_gradients(gradients)
        push.missing, push.rows, push.scale = filled.missing, filled.rows, filled.scale
        buffers.link.send(push)

    def _await_confirmation(self, buffers: ExchangeBuffers[Channel], *, empty: bool) -> bool:
        """Wait for the reply to a push; if the gradient is not used, revert the error feedback."""
        reply: PushReply = buffers.link.recv()
        if not (reply.used or empty):
            buffers.undo_feedback()
        return reply.used

    @property
    def error_feedback(self) -> list[Tensor]:
        return [buffers.error_feedback for buffers in self.servers.buffers]

    @error_feedback.setter
    def error_feedback(self, feedback: Sequence[Tensor]) -> None:
        for buffers, part in zip(self.servers.buffers, feedback, strict=True):
            buffers.error_feedback = part

    def pull_sums(self, version: int) -> None:
        self.weights.pull_sums(version)

    # -- held updates ---------------------------------------------------------------------------------------------

    def norm(self, clock: int, parameters: Sequence[Tensor]) -> float:
        """Return the 2-norm of a held gradient.

        Args:
            clock: number of the update.
            parameters: part of the gradient.
        """
        squares = 0.0
        for number, pieces in enumerate(self.servers.numbers(parameters)):
            squares += sum(self.servers.request(number, ReadNorm(clock, pieces)).content)
        return math.sqrt(squares)

    def apply(
        self, clock: int, scales: Sequence[tuple[list[Tensor], float]], limits: Sequence[tuple[list[Tensor], float]],
        groups: Groups | None = None,
    ) -> None:  # fmt: skip
        """Make a held update.

        Args:
            clock: number of the update.
            scales: (parameters, factor), applied first.
            limits: (parameters, limit) for the elements, applied second.
            groups: hyperparameters of this update; None for the values of the push.
        """
        scaled = [(self.servers.numbers(parameters), factor) for parameters, factor in scales]
        limited = [(self.servers.numbers(parameters), limit) for parameters, limit in limits]
        for n in range(len(self.servers.shards)):
            own_scales, own_limits = [(pieces[n], f) for pieces, f in scaled], [(pieces[n], x) for pieces, x in limited]
            self.servers.notify(n, ApplyUpdate(clock, own_scales, own_limits, groups))

    @property
    def traffic(self) -> tuple[int, int]:
        return self.servers.traffic

    def close(self, *, done: bool = True) -> None:
        self.weights.close()
        self.servers.close(done=done)
