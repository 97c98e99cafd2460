"""The asynchronous protocol: workers take leases of the data and do not wait for each other."""

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

EARLIER: Final = 256  # changes of hyperparameters that are kept for gradients that come late

CONFLICT: Final = (
    "the workers of one update have brought different hyperparameters, so which it was made with is a matter of time. "
    "A worker calls optimizer_step, and hooks, only for the batches that it trains: let what they set be a function of "
    "self.global_step alone (not of the value before, nor of one certain step), take a scheduler, or take mode='sync'"
)


class Asynchronous(WorkerProtocol):
    """A worker takes a lease, brings the newest weights, computes, and pushes. It is also who deals the leases.

    Attributes:
        lease: what is being trained.
        section: number of the newest one.
        planned: workers that the run began with.
        scheduled: updates whose global batches the schedules by steps have followed.
        dropped: the newest gradient came too late, and its data is dealt again.
        workers: as the servers number them, by rank.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.lease: Granted | None = None
        self._stale = True  # have the weights to be brought before the next step?
        self._stepped = False
        self._clips: list[tuple[str, list[Tensor], float]] = []  # of the sum that this worker's gradient is a part of
        self._version = 0  # of the weights, as far as it knows
        self._skipped = 0  # of the versions, global batches without a gradient
        self._pulled = 0  # updates that are in its weights
        self._number = 0  # of the update that the lease's gradient makes
        self._earlier: deque[tuple[int, Groups]] = deque(maxlen=EARLIER)  # of updates before a number, oldest first
        self.scheduled = 0
        self.planned = 0
        self.dropped = False
        self.section = -1
        self.workers: tuple[int, ...] = ()
        self._take_logged: Callable[[], dict[str, Any]] = dict
        self._logged_after: dict[str, Any] = {}  # by hooks, after the newest gradient was brought
        self._joined = False  # have the module's weights been those of all workers since any was trained?
        self._newest = -1  # update that this worker has brought a gradient for last

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
        """Return whether this worker has begun to train a lease, and has not brought its gradient."""
        return self.lease is not None

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease; what it logs is taken by that function, and goes with its gradient."""
        self._take_logged = take_logged
        self._logged_after = merge_sums(self._logged_after, take_logged())

    def _logged(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what goes with the next gradient; see `Push`."""
        after, self._logged_after = self._logged_after, {}
        return self._take_logged(), after

    def logged(self) -> dict[str, Any]:
        """Return what all workers have logged with the gradients of the newest section that are in the weights."""
        return self.client.logged(self.section)

    def end(self) -> None:
        self._take_logged, self._logged_after = dict, {}
        super().end()

    # -- one step -----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        if not self._stale:
            return
        self._stale, one_by_one = False, self.settings.orders_updates
        if self.lookout is not None and not one_by_one:
            self.client.begin_pull(self._least_version())
        else:
            reply = self.client.pull(self._parameters, self._least_version(), to_train=True, one_by_one=one_by_one)
            self._note(reply)

    def _note(self, reply: Reply) -> None:
        """Take note of the version of weights that have come."""
        self._version, self._skipped = reply.version, reply.skipped
        self._pulled = reply.version - reply.skipped

    def weights_step(self, step: int) -> int:
        super().weights_step(step)
        return self._pulled

    def came(self, reply: Reply | None, late: set[int]) -> None:
        super().came(reply, late)
        if reply is not None:
            self._note(reply)

    def _least_version(self) -> int:
        """Return how new weights have to be for the lease: the server that dealt it may be ahead of the others."""
        settings = self.settings
        if self.lease is None or not settings.aggregate or settings.max_staleness is None:
            return 0
        return max(0, self.lease.clock - settings.max_staleness)

    def next_update(self) -> int:
        """Bring the weights for the lease; returns of which update its gradient will be, as far as that is known."""
        self.before_step()
        return self._numbered(self._version)

    def take_turn(self, *, ordered: bool) -> int:
        """Return of which update the lease's gradient is: with `ordered` exactly, and others wait for the push.

        With several servers, where updates come as gradients arrive, the number is the first server's.
        """
        asks = ordered and not self.settings.aggregate and self.world.size > 1
        return self._numbered(self.client.take_turn() if asks else self._version)

    def _numbered(self, update: int) -> int:
        settings, lease = self.settings, self.lease
        whole = settings.aggregate and not settings.backup
        version = lease.clock if whole and lease is not None and lease.lease is not None else update
        self._number = version - self._skipped
        return self._number

    def passes(self, update: int) -> None:
        """Keep the hyperparameters, which are those of the updates before this one: the schedules go on."""
        self._earlier.append((update, groups_of(self._every_optimizer)))
        self.scheduled = update

    def groups(self) -> Groups:
        if not self._earlier or self._number >= self._earlier[-1][0]:
            return super().groups()
        return next(groups for update, groups in self._earlier if self._number < update)

    @property
    def brings_parts(self) -> bool:
        return self.settings.aggregate and self.settings.parts_of_update(self.world.size) > 1

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        if not self.brings_parts:
            return None
        self._clips.append(("norm", self.check_dense(parameters), max_norm))
        return torch.tensor(torch.nan)  # of a gradient that isn't complete yet

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        if self.brings_parts:
            self._clips.append(("value", self.check_dense(parameters), limit))
        return self.brings_parts

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
        self.forget_part()
        self._stale = True
        return self._number + stepped

    def meet(self) -> None:
        if any(server.conflicts for server in self.client.counts()):  # all that this worker has pushed is in
            raise RuntimeError(CONFLICT)
        self.world.barrier()
        if not self._joined:  # a callback may have let the module hold others meanwhile, such as averages
            self._note(self.client.pull(self._parameters))
            self._joined = True

    def join_hyperparameters(self) -> None:
        """Take over the hyperparameters of the worker that was part of the newest update; every rank calls it.

        Schedules have come to the same place on all ranks. What a module's own `optimizer_step` has set differs: a
        worker calls it for the updates that it is a part of.
        """
        told = self.world.gather_objects((self._newest, groups_of(self._every_optimizer)))
        _, newest = max(told, key=lambda worker: worker[0])
        for optimizer, groups in zip(self._every_optimizer, newest, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    @property
    def may_drop(self) -> bool:
        """Return whether gradients may be dropped because they are late."""
        return self.settings.may_drop

    # -- the data -----------------------------------------------------------------------------------------------

    @property
    def workers_of_update(self) -> int:
        fixed = self.settings.aggregate and not self.settings.backup  # backup workers: each has one part at most
        return self.planned if fixed and self.planned else self.world.size

    def position(self) -> tuple[int, int, int, int]:
        """Return what a worker that comes later has to know of the leases, for its `take_position`."""
        return self.section, self.planned, self.settings.workers, self.scheduled

    def take_position(self, position: tuple[int, int, int, int]) -> None:
        """Be where another worker is."""
        self.section, self.planned, self.settings.workers, self.scheduled = position

    @property
    def leases_per_update(self) -> int:
        """Return how many workers' batches make an update."""
        return self.settings.parts_of_update(self.world.size)

    def open(self, leases: int) -> None:
        """Begin a section of so many leases; all workers do."""
        self.section += 1
        self._joined = False
        self.client.open(self.section, leases, self._version, self.workers)

    def ask(self, *, wait: bool) -> Granted:
        """Return the next lease."""
        return self.client.ask(self.section, wait=wait)

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return the leases that are missing in the weights, those trained twice, and the step counted from.

        Each server has a part of the weights: the numbers are those of the worst.
        """
        servers = self.client.counts()
        dealt = servers[0].dealt
        lost = max(dealt - server.used for server in servers)
        return max(0, lost), max(server.repeated for server in servers), servers[0].begun

    def close_section(self) -> None:
        """Let all workers meet as soon as they have done what they hold."""
        self.client.close_section(self.section)

    def forget_weights(self) -> None:
        """Let all weights come next, whole: this worker has come later or has missed a section, and has others."""
        self.client.forget_tables()
        self._joined = False

    def let_all_meet(self) -> None:
        """Let others meet this worker, who may have begun another section since."""
        self.lease = None
        for section in (self.section, self.section + 1):
            self.client.close_section(section)

    def world_changed(self, world: World) -> None:
        """Go on with those that are there now."""
        self.world = world
