"""Distribution of the data to ranks that work at their own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Dealer:
    """Leases data to ranks that work at their own pace; the defaults are for ranks in lockstep, and do nothing.

    A section is the part of an epoch between two points at which all ranks meet. It consists of leases. A rank that is
    ready takes the next lease, trains its batches, and sends the gradient with the number of the lease.

    Attributes:
        lease: lease that this rank is training; None without a lease.
        section: number of the newest section.
        within_section: this rank has not reached the end of a section that has begun: its position in the data is still
            that of its start, and it waits for no other rank.
        planned: number of workers at the start of the run.
        scheduled: number of updates that step schedulers have followed.
        dropped: the newest gradient arrived too late, and its data will be leased again.
        keeps_state: batches change buffers or metric objects of this rank's module; set before training starts.
        workers: numbers of the training workers, by rank.
    """

    lease: Any = None
    section = -1
    within_section = False
    planned = 0
    scheduled = 0
    dropped = False
    keeps_state = False
    workers: tuple[int, ...] = ()

    # -- leases -------------------------------------------------------------------------------------------------

    def open(self, leases: int, data: tuple[int, int, int] | None = None) -> None:
        """Begin a section; every rank calls it.

        Args:
            leases: number of leases of the section.
            data: (epoch, position of the section in its order, items of that order); None for data without an order.
        """

    def ask(self, *, wait: bool) -> Any:
        """Return the next lease; None if there is none now.

        Args:
            wait: this rank holds no lease; wait until there is a lease or the section is over.
        """

    def begin_lease(self, take_logged: Callable[[], dict[str, Any]]) -> None:
        """Begin a lease.

        Args:
            take_logged: returns the metric sums that the lease has logged, which are sent with its gradient.
        """

    def trains(self, epoch: int, begin: int, end: int) -> None:
        """Count the samples of a batch, which are sent with its gradient.

        Args:
            epoch: number of the epoch.
            begin, end: range of the samples in its order.
        """

    @property
    def begins_update(self) -> bool:
        """Return whether the lease is the first whose gradient was not sent yet."""
        return False

    @property
    def leases_per_update(self) -> int:
        """Return the number of leases per update."""
        return 1

    def close_section(self) -> None:
        """Lease no more data in this section, so that all ranks meet after their present leases."""

    def leave_section(self) -> None:
        """Request no more leases of this section: this rank has no more data, although other ranks may have."""

    def let_all_meet(self) -> None:
        """Make other ranks meet this rank, also if they have begun the next section, or begin it later."""

    # -- updates ------------------------------------------------------------------------------------------------

    def next_update(self) -> int:
        """Pull weights for the lease; return the number of its update, as far as this rank knows."""
        return 0

    def take_turn(self, *, ordered: bool) -> int:
        """Return the number of the lease's update.

        Args:
            ordered: the number must be exact; other ranks then wait for this rank's gradient.
        """
        return 0

    def passes(self, update: int) -> None:
        """Save the hyperparameters of earlier updates for late gradients, before schedulers step.

        Args:
            update: number of the first update with new hyperparameters.
        """

    def join_hyperparameters(self) -> None:
        """Copy the hyperparameters of the rank with the newest update to all ranks; collective."""

    # -- dropped gradients --------------------------------------------------------------------------------------

    @property
    def may_drop(self) -> bool:
        """Return whether gradients may be dropped, so that this rank has to restore its state then."""
        return False

    @property
    def drops_late(self) -> bool:
        """Return whether gradients are dropped if they are late; their data are leased again."""
        return False

    def not_used(self) -> int:
        """Return the number of gradients that were dropped so far, this rank's own among them."""
        return 0

    def mark(self) -> None:
        """Save the state of this rank before a lease with `begins_update`."""

    def take_back(self) -> None:
        """Restore the state of `mark`, because the gradient since then was dropped."""

    # -- meetings and later workers -----------------------------------------------------------------------------

    def logged(self) -> dict[str, Any]:
        """Return the metric sums of all ranks for the used gradients of the newest section, which is over."""
        return {}

    def lost_and_repeated(self) -> tuple[int, int, int]:
        """Return (leases missing in the weights, leases trained twice, step at which counting began).

        Called when all ranks have met and all sections are over.
        """
        return 0, 0, 0

    def samples_lost_and_repeated(self, epoch: int, position: int) -> tuple[int, int]:
        """Return (samples missing in the weights, samples trained twice), by an account beside the leases.

        Called when all ranks have met and all sections are over.

        Args:
            epoch, position: end of the training in the data order.
        """
        return 0, 0

    def position(self) -> Any:
        """Return the state that a worker that joins later needs for `take_position`."""

    def take_position(self, position: Any) -> None:
        """Continue at the position of another worker.

        Args:
            position: result of `position`.
        """

    def forget_weights(self) -> None:
        """Pull complete weights next, because this worker has joined later or has missed a section."""
