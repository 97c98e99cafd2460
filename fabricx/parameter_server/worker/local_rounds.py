"""Local steps: workers train rounds of several leases independently, and exchange the change of their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.statistics.optimizer_moments import average_moments
from fabricx.distributed.world import World
from fabricx.parameter_server.wire.messages import Push, Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.pull_timing import PullTiming


@final
class LocalRounds(Asynchronous):
    """Protocol of local rounds: pull weights, train `every` leases with a local optimizer, push the difference.

    With "elastic", a worker keeps local weights, and each round moves them and the servers' weights towards each
    other.

    Args:
        settings: settings of the servers.
        every: leases per round.
        rate: fraction of the difference by which "elastic" moves the weights; None for 0.9 / workers.
    """

    servers_step = False

    def __init__(self, settings: Settings, every: int, rate: float | None) -> None:
        super().__init__(settings)
        self._every = every
        self._rate = rate
        # Weights at the start of the round; for "elastic", buffer for the servers' weights.
        self._base: list[Tensor] = []
        self._local: list[Tensor] = []  # this worker's weights, while the parameters hold the servers' weights
        self._leases: list[int] = []  # leases of this round
        self._skipped = 0  # those without a step, because they had no loss
        self._trained = 0  # leases trained by all workers, by the newest reply

    @property
    def _elastic(self) -> bool:
        return self.settings.outer == "elastic"

    def connect(
        self, world: World, exchange: Client, parameters: list[Tensor], optimizers: list[Optimizer],
        timing: PullTiming,
    ) -> None:  # fmt: skip
        super().connect(world, exchange, parameters, optimizers, timing)
        self._base = [torch.empty_like(parameter).detach() for parameter in parameters]

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        self.leases.planned = ranks
        self.settings.workers = self.world.size
        self.exchange.begin(self.settings, None, step, rule=self.server_rule)
        self._restart(step, module)
        self._trained = step
        self._local, self._leases, self._skipped = [], [], 0

    @property
    def unpushed(self) -> int:
        return len(self._leases)

    def disconnect(self) -> None:
        self._base, self._local = [], []
        super().disconnect()

    def before_step(self) -> None:
        if self._leases and self._repeats:
            self.push_unpushed()
        if self._local:
            _copy(self._local, self.parameters)
            self._local = []
        elif self._pull_due:
            self._pull(self.parameters)
            _copy(self.parameters, self._base)
        self._pull_due = False

    @property
    def _repeats(self) -> bool:
        """Return whether the lease was granted before, so that it must be a separate round.

        The earlier worker may have pushed a round with this lease to some servers. These ignore a round that contains
        leases that they have, so such a round must not contain other leases.
        """
        return self.leases.lease is not None and self.leases.lease.again

    def _pull(self, targets: Sequence[Tensor], *, to_train: bool = True) -> None:
        reply = self.exchange.weights.pull(targets, to_train=to_train)
        self.numbers.version, self._trained = reply.version, reply.trained

    def update_number(self) -> int:
        return self._trained + len(self._leases) - self._skipped

    def reserve_update(self) -> int:
        return self.update_number()  # each worker steps independently

    def await_weights(self, step: int) -> int:
        return step  # each worker has local weights

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self._stepped = True
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def finish_update(self, step: int) -> int:
        lease, again, self.leases.lease = self.leases.lease, self._repeats, None
        stepped, self._stepped = self._stepped, False
        if lease is None or lease.lease is None:
            return self.update_number()
        self._leases.append(lease.lease)
        self._skipped += not stepped
        self.numbers.newest = self.update_number()
        if again or len(self._leases) >= self._every:
            self.push_unpushed()
        return self.update_number()

    def push_unpushed(self) -> None:
        """End the round and push its change of the weights."""
        if not self._leases:
            return
        if self._elastic:
            self._pull(self._base)
            rate = 0.9 / self.world.size if self._rate is None else self._rate
            difference = torch._foreach_sub([parameter.detach() for parameter in self.parameters], self._base)
            torch._foreach_mul_(difference, rate)
            torch._foreach_sub_([parameter.detach() for parameter in self.parameters], difference)
            moved = torch._foreach_neg(difference)
        else:
            moved = torch._foreach_sub(self._base, [parameter.detach() for parameter in self.parameters])
            self._pull_due = True
        leases = self.leases
        push = Push(
            0, 1, tuple(self._leases), logged=leases.logged_sums(), samples=leases.take_samples(),
            skipped=self._skipped,
        )  # fmt: skip
        self.leases.dropped = not self.exchange.push(list(moved), push, answered=self.may_drop)
        self._trained += len(self._leases) - self._skipped
        self._leases, self._skipped = [], 0

    def meet(self) -> None:
        self.exchange.remote.counts()  # the reply follows all of this worker's pushes
        self.world.barrier()
        if not self.has_whole_weights:
            if self._elastic and not self._pull_due and not self._local:
                self._local = [parameter.detach().clone() for parameter in self.parameters]
            self._pull(self.parameters, to_train=False)
            self._pull_due = self.has_whole_weights = True
        self.world.barrier()  # an earlier push of the next section would be in the weights of some workers

    @contextlib.contextmanager
    def whole_states(self) -> Iterator[None]:
        """Save the servers' weights and the mean of the workers' optimizer states, with which all workers continue."""
        self._local = []
        for optimizer in self.optimizers.optimizers:
            average_moments(self.world, optimizer)
        yield


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    torch._foreach_copy_([target.detach() for target in targets], [source.detach() for source in sources])
