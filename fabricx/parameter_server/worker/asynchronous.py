"""Asynchronous protocol: workers train leases of the data and do not wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.distributed.metric_sums import merge_sums
from fabricx.distributed.world import World
from fabricx.parameter_server.optimizer_parts import groups_of
from fabricx.parameter_server.wire.messages import Granted, Groups, Reply, Settings
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.protocol import WorkerProtocol
from fabricx.parameter_server.worker.running_statistics import RunningStatistics

EARLIER: Final = 256  # changes of hyperparameters that are kept for late gradients

CONFLICT: Final = (
    "the workers of an update have sent different hyperparameters, so the update's values depend on timing. "
    "A worker calls optimizer_step, and hooks, only for the batches that it trains: make the values that they set a "
    "function of self.global_step alone (not of the previous value or a certain step), use a scheduler, or mode='sync'"
)


class Asynchronous(WorkerProtocol):
    """Protocol of a worker at its own pace: take a lease, pull the newest weights, compute and push a gradient.

    It implements the `Dealer` of the data feed.

    Args:
        settings: of the servers.

    Attributes:
        lease: lease that is being trained.
        section: number of the newest section.
        planned: number of workers at the begin of the run.
        scheduled: number of updates that step schedulers have followed.
        dropped: the newest gradient was late, and its data will be leased again.
        workers: worker numbers on the servers, by rank.
        statistics: running statistics of the module; None before training.
        keeps_state: batches change buffers or metric objects of the module on this worker.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.lease: Granted | None = None
        self._stale = True  # pull weights before the next step
        self._stepped = False
        self._clips: list[tuple[str, list[Tensor], float]] = []  # clipping of the sum that includes this gradient
        self._version = 0  # of the weights, as far as this worker knows
        self._skipped = 0  # versions without an update, because a global batch had no gradient
        self._pulled = 0  # updates in this worker's weights
        self._number = 0  # number of the update of the lease's gradient
        self._earlier: deque[tuple[int, Groups]] = deque(maxlen=EARLIER)  # (number, values before it), ascending
        self.scheduled = 0
        self.planned = 0
        self.dropped = False
        self.statistics: RunningStatistics | None = None
        self.keeps_state = False
        self.section = -1
        self.workers: tuple[int, ...] = ()
        self._take_logged: Callable[[], dict[str, Any]] = dict
        self._logged_after: dict[str, Any] = {}  # metric sums that hooks have logged since the newest push
        self._joined = False  # complete weights were pulled since the section began
        self._newest = -1  # update of this worker's newest push

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        super().begin(world, client, parameters, optimizers)
        self.workers = tuple(range(world.size))

    def starts(self, step: int) -> None:
        super().starts(step)
        self._version = self._pulled = self.scheduled = step
        self._stale, self.section, self._skipped, self._joined, self._newest = True, -1, 0, False, -1
        self._earlier.clear()

    @property
    def holds_leases(self) -> bool:
        """Return whether this worker trains a lease whose gradient was not pushed."""
        return self.lease is not None

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease.

        Args:
            take_logged: returns the metric sums that the lease has logged, which are sent with its gradient.
        """
        self._take_logged = take_logged
        self._logged_after = merge_sums(self._logged_after, take_logged())

    def _logged(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the metric sums for the next push; see `Push`."""
        after, self._logged_after = self._logged_after, {}
        return self._take_logged(), after

    def logged(self) -> dict[str, Any]:
        """Return the metric sums of all workers for the used gradients of the newest section."""
        return self.client.logged(self.section)

    def end(self) -> None:
        self._take_logged, self._logged_after = dict, {}
        super().end()

    # -- one step -----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        if not self._stale:
            return
        self._stale, one_by_one = False, self.settings.orders_updates
        if self.prefetch is not None and not one_by_one:
            self.client.begin_pull(self._least_version())
        else:
            reply = self.client.pull(self._parameters, self._least_version(), to_train=True, one_by_one=one_by_one)
            self._note(reply)

    def _note(self, reply: Reply) -> None:
        """Record the version of pulled weights."""
        self._version, self._skipped = reply.version, reply.skipped
        self._pulled = reply.version - reply.skipped

    def weights_step(self, step: int) -> int:
        super().weights_step(step)
        return self._pulled

    def on_weights(self, reply: Reply | None, late: set[int]) -> None:
        super().on_weights(reply, late)
        if reply is not None:
            self._note(reply)

    def _least_version(self) -> int:
        """Return the minimum version of weights for the lease; the server that granted it may be ahead of others."""
        settings = self.settings
        if self.lease is None or not settings.aggregate or settings.max_staleness is None:
            return 0
        return max(0, self.lease.clock - settings.max_staleness)

    def next_update(self) -> int:
        """Pull weights for the lease; returns the number of its update, as far as this worker knows."""
        self.before_step()
        return self._numbered(self._version)

    def take_turn(self, *, ordered: bool) -> int:
        """Return the number of the lease's update.

        With several servers and an update per gradient, the number is that of the first server.

        Args:
            ordered: the number must be exact; other workers then wait for this worker's push.
        """
        requests = ordered and not self.settings.aggregate and self.world.size > 1
        return self._numbered(self.client.take_turn() if requests else self._version)

    def _numbered(self, update: int) -> int:
        settings, lease = self.settings, self.lease
        whole = settings.aggregate and not settings.backup
        version = lease.clock if whole and lease is not None and lease.lease is not None else update
        self._number = version - self._skipped
        return self._number

    def passes(self, update: int) -> None:
        """Save the hyperparameters of earlier updates, before schedulers step.

        Args:
            update: number of the first update with new hyperparameters.
        """
        self._earlier.append((update, groups_of(self._every_optimizer)))
        self.scheduled = update

    def groups(self) -> Groups:
        if not self._earlier or self._number >= self._earlier[-1][0]:
            return super().groups()
        return next(groups for update, groups in self._earlier if self._number < update)

    @property
    def pushes_parts(self) -> bool:
        return self.settings.aggregate and self.settings.parts_of_update(self.world.size) > 1

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        if not self.pushes_parts:
            return None
        self._clips.append(("norm", self.check_dense(parameters), max_norm))
        return torch.tensor(torch.nan)  # the norm of the sum is unknown on this worker

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        if self.pushes_parts:
            self._clips.append(("value", self.check_dense(parameters), limit))
        return self.pushes_parts

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self._stepped = True
        return None

    def updated(self, step: int) -> int:
        stepped, self._stepped = self._stepped, False
        clips, self._clips = self._clips, []
        lease, self.lease = self.lease, None
        if lease is None or lease.lease is None:
            return self._version - self._skipped
        self.dropped = not self.push(
            self.gradients() if stepped else [],
            clock=lease.clock,
            parts=lease.parts,
            leases=(lease.lease,),
            share=lease.share,
            answered=self.may_drop,
            clips=clips,
            logged=self._logged(),
        )
        if stepped and not self.dropped:
            self._newest = self._number
        self._version = self._number + self._skipped + stepped
        self.drop_partial_gradients()
        self._stale = True
        return self._number + stepped

    def meet(self) -> None:
        if any(server.conflicts for server in self.client.counts()):  # the reply follows all of this worker's pushes
            raise RuntimeError(CONFLICT)
        self.world.barrier()
        if not self._joined:  # a callback may have replaced the module's weights meanwhile, for example by averages
            self._note(self.client.pull(self._parameters))
            self._joined = True

    def join_hyperparameters(self) -> None:
        """Copy the hyperparameters of the worker with the newest update to all ranks; every rank calls it.

        Schedulers are at the same step on all ranks. But values that a module's `optimizer_step` sets differ, because a
        worker calls it only for the updates that include its gradients.
        """
        states = self.world.gather_objects((self._newest, groups_of(self._every_optimizer)))
        _, newest = max(states, key=lambda worker: worker[0])
        for optimizer, groups in zip(self._every_optimizer, newest, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    @property
    def may_drop(self) -> bool:
        """Return whether gradients may be dropped, so that pushes need a reply.

        They are dropped if they are late, or if another worker holds their lease: lost links are replaced if servers
        restart.
        """
        return self.settings.may_drop or (self.keeps_state and self.settings.snapshot_every > 0)

    @property
    def begins_update(self) -> bool:
        """Return whether the lease is the first whose gradient was not pushed yet."""
        return True

    def mark(self) -> None:
        """Save the batch counts of running statistics, before a lease with `begins_update`."""
        if self.statistics is not None:
            self.statistics.mark()

    def take_back(self) -> None:
        """Restore the counts of `mark`, because the gradient was dropped."""
        self.dropped = False
        if self.statistics is not None:
            self.statistics.rewind()

    # -- the data -----------------------------------------------------------------------------------------------

    @property
    def workers_of_update(self) -> int:
        fixed = self.settings.aggregate and not self.settings.backup  # with backup workers, each has at most one part
        return self.planned if fixed and self.planned else self.world.size

    def position(self) -> tuple[int, int, int, int]:
        """Return the state of leases for `take_position` of a worker that joins later."""
        return self.section, self.planned, self.settings.workers, self.scheduled

    def take_position(self, position: tuple[int, int, int, int]) -> None:
        """Continue at the position of another worker.

        Args:
            position: result of `position`.
        """
        self.section, self.planned, self.settings.workers, self.scheduled = position

    @property
    def leases_per_update(self) -> int:
        """Return the number of leases per update."""
        return self.settings.parts_of_update(self.world.size)

    def open(self, leases: int) -> None:
        """Begin a section; every worker calls it.

        Args:
            leases: number of leases.
        """
        self.section += 1
        self._joined = False
        self.client.open(self.section, leases, self._version, self.workers)

    def ask(self, *, wait: bool) -> Granted:
        """Request the next lease.

        Args:
            wait: see `Client.ask`.
        """
        return self.client.ask(self.section, wait=wait)

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return (leases missing in the weights, leases trained twice, step at which counting began).

        Each server has a part of the weights: the numbers are the maximum over servers.
        """
        servers = self.client.counts()
        dealt = servers[0].dealt
        lost = max(dealt - server.used for server in servers)
        return max(0, lost), max(server.repeated for server in servers), servers[0].begun

    def close_section(self) -> None:
        """End the distribution of leases, so that all workers meet after their present leases."""
        self.client.close_section(self.section)

    def forget_weights(self) -> None:
        """Pull complete weights next: this worker has joined later or has missed a section."""
        self.client.forget_tables()
        self._joined = False

    def let_all_meet(self) -> None:
        """Make other workers meet this worker, also if they have begun the next section."""
        self.lease = None
        for section in (self.section, self.section + 1):
            self.client.close_section(section)

    def world_changed(self, world: World) -> None:
        """Continue with other ranks.

        Args:
            world: the new ranks.
        """
        self.world = world
