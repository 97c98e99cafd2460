"""How workers go on that don't wait for each other: each takes the next part of the data when it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fabricx.comm.world import World
from fabricx.exchange.client import Client
from fabricx.exchange.messages import Granted, Reply, Settings
from fabricx.exchange.pace import Pace


class Apart(Pace):
    """A worker takes a lease, brings the newest weights, computes, and pushes. It is also who deals the leases.

    Attributes:
        lease: what is being trained.
        section: number of the newest one.
        workers: as the servers number them, by rank.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.lease: Granted | None = None
        self._stale = True  # have the weights to be brought before the next step?
        self._stepped = False
        self._version = 0  # updates that it knows of
        self.section = -1
        self.workers: tuple[int, ...] = ()

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        super().begin(world, client, parameters, optimizers)
        self.workers = tuple(range(world.size))

    def starts(self, step: int) -> None:
        super().starts(step)
        self._version = step
        self._stale, self.section = True, -1

    # -- one step -----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        if not self._stale:
            return
        self._stale, one_by_one = False, self.settings.orders_updates
        if self.lookout is not None and not one_by_one:
            self.client.begin_pull(self._least_version())
        else:
            reply = self.client.pull(self._parameters, self._least_version(), to_train=True, one_by_one=one_by_one)
            self._version = reply.version

    def came(self, reply: Reply | None, late: set[int]) -> None:
        super().came(reply, late)
        if reply is not None:
            self._version = reply.version

    def _least_version(self) -> int:
        """Return how new weights have to be for the lease: the server that dealt it may be ahead of the others."""
        settings = self.settings
        if self.lease is None or not settings.aggregate or settings.max_staleness is None:
            return 0
        return max(0, self.lease.clock - settings.max_staleness)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self._stepped = True
        return None

    def updated(self, step: int) -> int:
        stepped, self._stepped = self._stepped, False
        lease, self.lease = self.lease, None
        if lease is None or lease.lease is None:
            return self._version
        self.push(
            self.gradients() if stepped else [],
            clock=lease.clock,
            parts=lease.parts,
            leases=(lease.lease,),
            share=lease.share,
        )
        self._version += stepped
        self._stale = True
        return self._version

    def meet(self) -> None:
        self.client.counts()  # all that this worker has pushed is in
        self.world.barrier()
        self._version = self.client.pull(self._parameters).version

    # -- the data -----------------------------------------------------------------------------------------------

    @property
    def planned(self) -> int:
        """Return how many workers training began with."""
        return self.settings.workers

    @planned.setter
    def planned(self, workers: int) -> None:
        self.settings.workers = workers

    @property
    def leases_per_update(self) -> int:
        """Return how many workers' batches make an update."""
        return self.settings.parts_of_update(self.world.size)

    def open(self, leases: int) -> None:
        """Begin a section of so many leases; all workers do."""
        self.section += 1
        self.client.open(self.section, leases, self._version, self.workers)

    def ask(self, *, wait: bool) -> Granted:
        """Return the next lease."""
        return self.client.ask(self.section, wait=wait)

    def close_section(self) -> None:
        """Let all workers meet as soon as they have done what they hold."""
        self.client.close_section(self.section)

    def let_all_meet(self) -> None:
        """Let others meet this worker, who may have begun another section since."""
        self.lease = None
        for section in (self.section, self.section + 1):
            self.client.close_section(section)

    def world_changed(self, world: World) -> None:
        """Go on with those that are there now."""
        self.world = world
