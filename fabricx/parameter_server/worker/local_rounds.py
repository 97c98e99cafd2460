"""The protocol of local steps: workers step independently and exchange their movement every few steps."""

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
class Rounds(Asynchronous):
    """A worker takes the servers' weights, trains `every` leases with its own optimizer, and brings the difference.

    With "elastic" it keeps its own weights, and each round draws them and the servers' towards each other.

    Args:
        settings: of the servers.
        every: leases of a round.
        rate: of "elastic": which part of the difference.
    """

    servers_step = False

    def __init__(self, settings: Settings, every: int, rate: float | None) -> None:
        super().__init__(settings)
        self._every = every
        self._rate = rate
        self._base: list[Tensor] = []  # where this round began; for "elastic", room for the servers' weights
        self._own: list[Tensor] = []  # this worker's weights, while the parameters hold the servers'
        self._mine: list[int] = []  # leases of this round
        self._trained = 0  # leases of all workers, as far as it knows
        self.velocity: list[Tensor] | None = None  # of the servers, by parameter, when training starts

    @property
    def _elastic(self) -> bool:
        return self.settings.outer == "elastic"

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        super().begin(world, client, parameters, optimizers)
        self._base = [torch.empty_like(parameter).detach() for parameter in parameters]

    @property
    def holds_leases(self) -> bool:
        return super().holds_leases or bool(self._mine)

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        if self._mine:  # the round goes on, and what hooks have logged belongs to it
            self._take_logged = take_logged
        else:
            super().begin_lease(take_logged)

    def starts(self, step: int) -> None:
        self.settings.workers = self.world.size
        self.client.begin(self.settings, None, step, velocity=self.velocity)
        self._version = self._trained = self.scheduled = step
        self._stale, self.section, self._joined = True, -1, False
        self._earlier.clear()
        self._own, self._mine = [], []

    def end(self) -> None:
        self._base, self._own = [], []
        super().end()

    def before_step(self) -> None:
        if self._mine and self._repeats:
            self._bring()
        if self._own:
            _copy(self._own, self._parameters)
            self._own = []
        elif self._stale:
            self._pull(self._parameters)
            _copy(self._parameters, self._base)
        self._stale = False

    @property
    def _repeats(self) -> bool:
        """Return whether the lease was another worker's before: then it is a round by itself.

        That worker may have brought a round with it to some of the servers. They ignore what they have, which has to be
        all of this round, or nothing.
        """
        return self.lease is not None and self.lease.again

    def _pull(self, targets: Sequence[Tensor], *, to_train: bool = True) -> None:
        reply = self.client.pull(targets, to_train=to_train)
        self._version, self._trained = reply.version, reply.trained

    def _numbered(self, update: int) -> int:
        return self._trained + len(self._mine)

    def weights_step(self, step: int) -> int:
        return step  # each has weights of its own, which it steps

    def take_turn(self, *, ordered: bool) -> int:
        return self._numbered(0)  # each steps by itself

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def updated(self, step: int) -> int:
        lease, again, self.lease = self.lease, self._repeats, None
        if lease is None or lease.lease is None:
            return self._trained + len(self._mine)
        self._mine.append(lease.lease)
        self._newest = self._trained + len(self._mine)
        if again or len(self._mine) >= self._every:
            self._bring()
        return self._trained + len(self._mine)

    def _bring(self) -> None:
        """End a round."""
        if not self._mine:
            return
        if self._elastic:
            self._pull(self._base)
            rate = 0.9 / self.world.size if self._rate is None else self._rate
            apart = torch._foreach_sub([parameter.detach() for parameter in self._parameters], self._base)
            torch._foreach_mul_(apart, rate)
            torch._foreach_sub_([parameter.detach() for parameter in self._parameters], apart)
            moved = torch._foreach_neg(apart)
        else:
            moved = torch._foreach_sub(self._base, [parameter.detach() for parameter in self._parameters])
            self._stale = True
        self.push(list(moved), leases=tuple(self._mine), logged=self._logged())
        self._trained += len(self._mine)
        self._mine = []

    def meet(self) -> None:
        self.client.counts()  # all that this worker has pushed is in
        self.world.barrier()
        if self._joined:
            return
        if self._elastic and not self._stale and not self._own:
            self._own = [parameter.detach().clone() for parameter in self._parameters]
        self._pull(self._parameters, to_train=False)
        self._stale = self._joined = True

    @contextmanager
    def whole_states(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """All workers go on from what the checkpoint has: the servers' weights, and the mean of the moments."""
        self._own = []
        for optimizer in optimizers:
            self.world.join_moments(optimizer)
        yield

    def ask(self, *, wait: bool) -> Granted:
        granted = super().ask(wait=wait and not self._mine)
        if granted.lease is None and wait and self._mine:  # it holds the leases of its round: nobody else can end it
            self._bring()
            granted = super().ask(wait=True)
        return granted


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    torch._foreach_copy_([target.detach() for target in targets], [source.detach() for source in sources])
