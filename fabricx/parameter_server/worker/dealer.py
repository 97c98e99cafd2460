"""Distributes leases of the data to a worker at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from fabricx.core.strategy_support.dealer import Dealer
from fabricx.parameter_server.wire.messages import Groups, LeaseReply
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.lease_state import LeaseState
from fabricx.parameter_server.worker.update_numbers import EarlierGroups

Position = tuple[int, int, int, int, Groups, EarlierGroups]


@final
class LeaseDealer(LeaseState, Dealer):
    """The `Dealer` of the data feed: requests leases for a protocol, which trains them.

    Args:
        protocol: this worker's protocol; its leases are those of the dealer.
    """

    def __init__(self, protocol: Asynchronous) -> None:
        super().__init__()
        self._protocol = protocol
        protocol.leases = self

    # -- sections -------------------------------------------------------------------------------------------------

    def open(self, leases: int, data: tuple[int, int, int] | None = None) -> None:
        """Begin a section; every worker calls it.

        Args:
            leases: number of leases.
            data: see `OpenSection`.
        """
        self.section += 1
        self.within_section = True
        self._protocol.has_whole_weights = False
        version = self._protocol.numbers.version
        self._protocol.exchange.leases.open(self.section, leases, version, self.workers, data)

    def ask(self, *, wait: bool) -> LeaseReply:
        """Request the next lease.

        Args:
            wait: see `LeaseRequests.ask`.
        """
        requests, unpushed = self._protocol.exchange.leases, self._protocol.unpushed
        granted = requests.ask(self.section, wait=wait and not unpushed)
        if granted.lease is None and wait and unpushed:  # the section can't end while this worker holds leases
            self._protocol.push_unpushed()
            granted = requests.ask(self.section, wait=True)
        return granted

    def close_section(self) -> None:
        """End the distribution of leases, so that all workers meet after their present leases."""
        self._protocol.exchange.leases.close_section(self.section)

    def leave_section(self) -> None:
        """Request no more leases of this section: the data of this worker are over."""
        self._protocol.push_unpushed()  # a worker that holds leases can't leave: others would be granted them
        self._protocol.exchange.leases.leave_section(self.section)

    def let_all_meet(self) -> None:
        """Make other workers meet this worker, also if they have begun the next section, or begin it later."""
        self.lease = None
        for section in (self.section, self.section + 1):
            self._protocol.exchange.leases.close_section(section)

    def logged(self) -> dict[str, Any]:
        """Return the metric sums of all workers for the used gradients of the newest section."""
        return self._protocol.exchange.leases.logged(self.section)

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return (leases missing in the weights, leases trained twice, step at which counting began).

        Each server has a part of the weights: the numbers are the maximum over servers.
        """
        servers = self._protocol.exchange.remote.counts()
        dealt = servers[0].dealt
        lost = max(dealt - server.used for server in servers)
        return max(0, lost), max(server.repeated for server in servers), servers[0].begun

    def samples_lost_and_repeated(self, epoch: int, position: int) -> tuple[int, int]:
        """Return (samples missing in the weights, samples trained twice): the maximum over servers.

        Args:
            epoch, position: end of the training in the data order.
        """
        counts = [ledger.lost_and_repeated(epoch, position) for ledger in self._protocol.exchange.remote.samples()]
        return max(lost for lost, _ in counts), max(repeated for _, repeated in counts)

    # -- the present lease ----------------------------------------------------------------------------------------

    @property
    def leases_per_update(self) -> int:
        """Return the number of leases per update."""
        return self._protocol.settings.parts_of_update(self._protocol.world.size)

    @property
    def begins_update(self) -> bool:
        """Return whether the lease is the first whose gradient was not pushed yet."""
        return not self._protocol.unpushed

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease.

        Args:
            take_logged: returns the metric sums that the lease has logged, which are sent with its gradient.
        """
        self.log_with(take_logged, new_update=self.begins_update)

    def next_update(self) -> int:
        """Pull weights for the lease; returns the number of its update, by the newest version that has arrived."""
        self._protocol.before_step()
        return self._protocol.update_number()

    def take_turn(self, *, ordered: bool) -> int:
        """Return the number of the lease's update.

        Args:
            ordered: the number must be exact; other workers then wait for this worker's push.
        """
        return self._protocol.reserve_update() if ordered else self._protocol.update_number()

    # -- dropped gradients ----------------------------------------------------------------------------------------

    @property
    def may_drop(self) -> bool:
        """Return whether gradients may be dropped; this worker then restores its state."""
        return self._protocol.may_drop

    @property
    def drops_late(self) -> bool:
        """Return whether gradients are dropped if they are late; their data are leased again."""
        return self._protocol.settings.may_drop

    def not_used(self) -> int:
        """Return the number of gradients that were dropped so far; the reply follows all pushes of this worker."""
        return max(server.dropped for server in self._protocol.exchange.remote.counts())

    def mark(self) -> None:
        """Save the batch counts of running statistics, before a lease with `begins_update`."""
        self._protocol.statistics.mark()

    def take_back(self) -> None:
        """Restore the counts of `mark`, because the gradient was dropped."""
        self.dropped = False
        self._protocol.statistics.rewind()

    # -- hyperparameters ------------------------------------------------------------------------------------------

    def passes(self, update: int) -> None:
        """Save the hyperparameters of earlier updates, before schedulers step.

        Args:
            update: number of the first update with new hyperparameters.
        """
        self._protocol.numbers.keep_earlier_groups(update, self._protocol.optimizers.groups())
        self.scheduled = update

    def join_hyperparameters(self) -> None:
        """Copy the hyperparameters of the worker with the newest update to all ranks; every rank calls it.

        Schedulers are at the same step on all ranks. But values that a module's `optimizer_step` sets differ, because a
        worker calls it only for the updates that include its gradients.
        """
        optimizers, newest = self._protocol.optimizers, self._protocol.numbers.newest
        states = self._protocol.world.gather_objects((newest, optimizers.groups()))
        optimizers.set_groups(max(states, key=lambda worker: worker[0])[1])

    # -- other workers --------------------------------------------------------------------------------------------

    def position(self) -> Position:
        """Return the state of leases for `take_position` of a worker that joins later.

        It includes the hyperparameters that belong to the step of the schedules.
        """
        protocol = self._protocol
        groups = protocol.optimizers.present_groups(), protocol.numbers.all_earlier_groups()
        return self.section, self.planned, protocol.settings.workers, self.scheduled, *groups

    def take_position(self, position: Position) -> None:
        """Continue at the position of another worker.

        Args:
            position: result of `position`.
        """
        protocol = self._protocol
        self.section, self.planned, protocol.settings.workers, self.scheduled, groups, earlier = position
        protocol.optimizers.set_groups(groups)
        protocol.numbers.take_earlier_groups(earlier)

    def forget_weights(self) -> None:
        """Pull complete weights next: this worker has joined later or has missed a section."""
        self._protocol.exchange.weights.forget_tables()
        self._protocol.has_whole_weights = False
