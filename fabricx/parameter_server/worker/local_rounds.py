"""Local steps: workers train rounds of several leases independently, and exchange the change of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.distributed.world import World
from fabricx.parameter_server.wire.messages import Granted, Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.client import Client


@final
class LocalRounds(Asynchronous):
    """Protocol of local rounds: pull weights, train `every` leases with a local optimizer, push the difference.

    With "elastic", a worker keeps its own weights, and each round moves them and the servers' weights towards each
    other.

    Args:
        settings: of the servers.
        every: leases per round.
        rate: of "elastic": fraction of the difference; None for 0.9 / workers.
    """

    servers_step = False

    def __init__(self, settings: Settings, every: int, rate: float | None) -> None:
        super().__init__(settings)
        self._every = every
        self._rate = rate
        self._base: list[
            Tensor
        ] = []  # weights at the begin of the round; for "elastic", buffer for the servers' weights
        self._local: list[Tensor] = []  # this worker's weights, while the parameters hold the servers' weights
        self._leases: list[int] = []  # leases of this round
        self._trained = 0  # leases trained by all workers, as far as this worker knows
        self.velocity: list[Tensor] | None = None  # initial velocity of the outer optimizer, by parameter

    @property
    def _elastic(self) -> bool:
        return self.settings.outer == "elastic"

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        super().begin(world, client, parameters, optimizers)
        self._base = [torch.empty_like(parameter).detach() for parameter in parameters]

    @property
    def holds_leases(self) -> bool:
        return super().holds_leases or bool(self._leases)

    @property
    def begins_update(self) -> bool:
        return not self._leases

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        if self._leases:  # the round continues; values that hooks have logged belong to it
            self._take_logged = take_logged
        else:
            super().begin_lease(take_logged)

    def starts(self, step: int) -> None:
        self.settings.workers = self.world.size
        self.client.begin(self.settings, None, step, velocity=self.velocity)
        self._version = self._trained = self.scheduled = step
        self._stale, self.section, self._joined = True, -1, False
        self._earlier.clear()
        self._local, self._leases = [], []

    def end(self) -> None:
        self._base, self._local = [], []
        super().end()

    def before_step(self) -> None:
        if self._leases and self._repeats:
            self._push_round()
        if self._local:
            _copy(self._local, self._parameters)
            self._local = []
        elif self._stale:
            self._pull(self._parameters)
            _copy(self._parameters, self._base)
        self._stale = False

    @property
    def _repeats(self) -> bool:
        """Return whether the lease was granted before, so that it must be a round of its own.

        The earlier worker may have pushed a round with this lease to some servers. These ignore a round that contains
        leases that they have, so such a round must not contain other leases.
        """
        return self.lease is not None and self.lease.again

    def _pull(self, targets: Sequence[Tensor], *, to_train: bool = True) -> None:
        reply = self.client.pull(targets, to_train=to_train)
        self._version, self._trained = reply.version, reply.trained

    def _numbered(self, update: int) -> int:
        return self._trained + len(self._leases)

    def weights_step(self, step: int) -> int:
        return step  # each worker has weights of its own

    def take_turn(self, *, ordered: bool) -> int:
        return self._numbered(0)  # each worker steps independently

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def updated(self, step: int) -> int:
        lease, again, self.lease = self.lease, self._repeats, None
        if lease is None or lease.lease is None:
            return self._trained + len(self._leases)
        self._leases.append(lease.lease)
        self._newest = self._trained + len(self._leases)
        if again or len(self._leases) >= self._every:
            self._push_round()
        return self._trained + len(self._leases)

    def _push_round(self) -> None:
        """End the round and push its change of the weights."""
        if not self._leases:
            return
        if self._elastic:
            self._pull(self._base)
            rate = 0.9 / self.world.size if self._rate is None else self._rate
            difference = torch._foreach_sub([parameter.detach() for parameter in self._parameters], self._base)
            torch._foreach_mul_(difference, rate)
            torch._foreach_sub_([parameter.detach() for parameter in self._parameters], difference)
            moved = torch._foreach_neg(difference)
        else:
            moved = torch._foreach_sub(self._base, [parameter.detach() for parameter in self._parameters])
            self._stale = True
        self.dropped = not self.push(
            list(moved), leases=tuple(self._leases), answered=self.may_drop, logged=self._logged()
        )
        self._trained += len(self._leases)
        self._leases = []

    def meet(self) -> None:
        self.client.counts()  # the reply follows all of this worker's pushes
        self.world.barrier()
        if self._joined:
            return
        if self._elastic and not self._stale and not self._local:
            self._local = [parameter.detach().clone() for parameter in self._parameters]
        self._pull(self._parameters, to_train=False)
        self._stale = self._joined = True

    @contextmanager
    def whole_states(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Save the servers' weights and the mean of the workers' optimizer states, with which all workers continue."""
        self._local = []
        for optimizer in optimizers:
            self.world.average_moments(optimizer)
        yield

    def ask(self, *, wait: bool) -> Granted:
        granted = super().ask(wait=wait and not self._leases)
        if granted.lease is None and wait and self._leases:  # the section can't end while this worker holds leases
            self._push_round()
            granted = super().ask(wait=True)
        return granted


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    torch._foreach_copy_([target.detach() for target in targets], [source.detach() for source in sources])
