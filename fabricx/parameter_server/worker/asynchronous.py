"""Asynchronous protocol: workers train leases of the data and do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.world import World
from fabricx.parameter_server.wire.messages import Groups, Push, Settings
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.exchange import Clip
from fabricx.parameter_server.worker.lease_state import LeaseState
from fabricx.parameter_server.worker.protocol import WorkerProtocol
from fabricx.parameter_server.worker.pull_timing import PullTiming
from fabricx.parameter_server.worker.running_statistics import RunningStatistics
from fabricx.parameter_server.worker.update_numbers import UpdateNumbers

CONFLICT: Final = (
    "the workers of an update have sent different hyperparameters, so the update's values depend on timing. "
    "A worker calls optimizer_step, and hooks, only for the batches that it trains: make the values that they set a "
    "function of self.global_step alone (not of the previous value or a certain step), use a scheduler, or mode='sync'"
)


class Asynchronous(WorkerProtocol[Client]):
    """Protocol of an asynchronous worker: request a lease, pull the newest weights, compute and push a gradient.

    A `LeaseDealer` requests the leases.

    Args:
        settings: settings of the servers.

    Attributes:
        leases: lease that is being trained.
        numbers: numbers of updates.
        statistics: running statistics of the module.
        has_whole_weights: complete weights were pulled since the section began.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.leases = LeaseState()
        self.numbers = UpdateNumbers(0)
        self.statistics = RunningStatistics(nn.Identity())
        self.has_whole_weights = False
        self._pull_due = True  # pull weights before the next step
        self._stepped = False
        self._clips: list[Clip] = []  # clipping of the sum that includes this gradient

    def connect(
        self, world: World, exchange: Client, parameters: list[Tensor], optimizers: list[Optimizer],
        timing: PullTiming,
    ) -> None:  # fmt: skip
        super().connect(world, exchange, parameters, optimizers, timing)
        self.leases.workers = tuple(range(world.size))

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        self.leases.planned = ranks
        super().start_training(step, ranks, module)
        self._restart(step, module)

    def _restart(self, step: int, module: nn.Module | None) -> None:
        """Reset the numbers, statistics and leases of an earlier run."""
        self.numbers = UpdateNumbers(step)
        self.statistics = RunningStatistics(module or nn.Identity())
        self.leases.section, self.leases.scheduled, self.leases.within_section = -1, step, False
        self._pull_due, self.has_whole_weights = True, False

    @property
    def workers_of_update(self) -> int:
        # Global batches keep their size when workers die. With backup workers, each worker has at most a single part.
        fixed = self.settings.aggregate and not self.settings.backup
        return self.leases.planned if fixed and self.leases.planned else self.world.size

    def disconnect(self) -> None:
        self.leases.end()
        self.statistics = RunningStatistics(nn.Identity())
        super().disconnect()

    # -- leases ---------------------------------------------------------------------------------------------------

    @property
    def unpushed(self) -> int:
        """Return the number of trained leases without a push of their weight changes."""
        return 0

    def push_unpushed(self) -> None:
        """Push the weight changes of all trained leases."""

    def update_number(self) -> int:
        """Return the number of the lease's update, by the newest version that this worker has received."""
        return self._set_number(self.numbers.version)

    def reserve_update(self) -> int:
        """Return the exact number of the lease's update; other workers may wait until this worker has pushed.

        With several servers and an update per gradient, the number is that of the first server.
        """
        if self.settings.aggregate or self.world.size == 1:
            return self.update_number()
        return self._set_number(self.exchange.leases.take_turn().version)

    def _set_number(self, version: int) -> int:
        settings, lease, numbers = self.settings, self.leases.lease, self.numbers
        if settings.aggregate and not settings.backup and lease is not None and lease.lease is not None:
            version = lease.clock
        numbers.number = version - numbers.skipped
        return numbers.number

    @property
    def may_drop(self) -> bool:
        """Return whether gradients may be dropped, so that pushes need a reply.

        They are dropped if they are late, or if another worker holds their lease: lost links are replaced if servers
        restart.
        """
        return self.settings.may_drop or (self.leases.keeps_state and self.settings.snapshot_every > 0)

    # -- a step ---------------------------------------------------------------------------------------------------

    def computing_gradient(self) -> AbstractContextManager[Any]:
        self.statistics.computed()
        return self._computing()

    def before_step(self) -> None:
        if self._pull_due:
            self._pull_due = False
            self.timing.pull(self._least_version(), self.numbers.note, one_by_one=self.settings.orders_updates)

    def _least_version(self) -> int:
        """Return the minimum version of weights for the lease; the granting server may be ahead of other servers."""
        settings, lease = self.settings, self.leases.lease
        if lease is None or not settings.aggregate or settings.max_staleness is None:
            return 0
        return max(0, lease.clock - settings.max_staleness)

    def await_weights(self, step: int) -> int:
        super().await_weights(step)
        return self.numbers.pulled

    def groups(self) -> Groups | None:
        earlier = self.numbers.earlier_groups(self.numbers.number) if self.servers_step else None
        return super().groups() if earlier is None else earlier

    @property
    def pushes_parts(self) -> bool:
        return self.settings.aggregate and self.settings.parts_of_update(self.world.size) > 1

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        if not self.pushes_parts:
            return None
        self._clips.append(("norm", self.gradients.check_dense(parameters), max_norm))
        return torch.tensor(torch.nan)  # the norm of the sum is unknown on this worker

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        if self.pushes_parts:
            self._clips.append(("value", self.gradients.check_dense(parameters), limit))
        return self.pushes_parts

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self._stepped = True
        self.optimizers.keep_groups(optimizer)

    def finish_update(self, step: int) -> int:
        stepped, self._stepped = self._stepped, False
        clips, self._clips = self._clips, []
        leases, numbers = self.leases, self.numbers
        lease, leases.lease = leases.lease, None
        if lease is None or lease.lease is None:
            self.optimizers.end_update()
            return numbers.version - numbers.skipped  # this worker has trained no data
        push = Push(
            lease.clock, lease.parts, (lease.lease,), share=lease.share, groups=self.groups(),
            logged=leases.logged_sums(), samples=leases.take_samples(),
        )  # fmt: skip
        self.optimizers.end_update()
        gradients = self.gradients.all() if stepped else []
        leases.dropped = not self.exchange.push(gradients, push, clips=clips, answered=self.may_drop)
        self.drop_partial_gradients()
        self._pull_due = True
        return numbers.pushed(stepped=stepped, used=not leases.dropped)

    # -- between the workers --------------------------------------------------------------------------------------

    def meet(self) -> None:
        if any(server.conflicts for server in self.exchange.remote.counts()):  # the reply follows all own pushes
            raise RuntimeError(CONFLICT)
        self.world.barrier()
        if not self.has_whole_weights:  # a callback may have replaced the module's weights meanwhile
            self.numbers.note(self.exchange.weights.pull(self.parameters))
            self.has_whole_weights = True
        self.world.barrier()  # an earlier push of the next section would be in the weights and the step of some workers

    def pool_statistics(self) -> None:
        self.statistics.pool(self.world)

    def whole_states(self) -> AbstractContextManager[Any]:
        return self.optimizers.holding(self.exchange.remote.optimizers())
