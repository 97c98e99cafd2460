"""Which leases of a section are granted, and which of their gradients were received and used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from fabricx.parameter_server.server.leases import Leases, LeaseSet
from fabricx.parameter_server.server.logged_sums import LoggedSums
from fabricx.parameter_server.wire.messages import Counts, LeaseReply


@final
class LeaseLedger:
    """The leases of the newest section, on the server that grants them or on a server that only records gradients.

    Args:
        workers: initial number of workers.
        grants: this server grants the leases; other servers only record which gradients they have received.
        counts: statistics of the server, updated in place.

    Attributes:
        leases: leases of the newest section.
        is_leased: gradients belong to leases; otherwise workers are in lockstep.
        logged: metric sums of the used leases.
        grants: see Args.
    """

    def __init__(self, workers: int, *, grants: bool, counts: Counts) -> None:
        self.leases = Leases(-1, 0, range(workers))
        self.is_leased = False
        self.logged = LoggedSums()
        self.grants = grants
        self._counts = counts
        self._received = LeaseSet()
        self._used = LeaseSet()

    @property
    def workers(self) -> Collection[int]:
        """Return the numbers of the present workers."""
        return self.leases.workers

    def open(self, leases: Leases) -> None:
        """Begin a section.

        Args:
            leases: leases of the section.
        """
        self.leases, self.is_leased = leases, True
        self._received, self._used = LeaseSet(), LeaseSet()
        self.logged.open(leases.section)
        self._counts.dealt += leases.count

    def grant(self, worker: int) -> LeaseReply:
        """Grant the next lease to a worker, if one is available for it.

        Args:
            worker: number of the worker.
        """
        granted = self.leases.grant(worker)
        self._counts.lead = max(self._counts.lead, self.leases.lead)
        return granted

    def close(self) -> None:
        """Grant no new leases of the section, except to complete an update."""
        before = self.leases.count
        self.leases.close()
        self._counts.dealt += self.leases.count - before

    def accepts(self, worker: int, leases: Sequence[int], *, in_order: bool) -> bool:
        """Return whether a gradient is to be used: each server uses a single gradient of each lease.

        The server that grants leases accepts the gradient of the worker that holds the lease. If the sender does not
        hold it any more (its link was lost, or it was assumed dead), the gradient of the present or the next holder is
        used. Other servers accept the first gradient.

        Args:
            worker: number of the sender.
            leases: leases of the gradient.
            in_order: the version of the worker's weights is certain, as ordered updates require.
        """
        if self.grants:
            if in_order and all(self.leases.holder(lease) == worker for lease in leases):
                return True
            for lease in leases:
                if self.leases.holder(lease) == worker:
                    self.leases.take_back(lease)
            return False
        if any(lease in self._received for lease in leases):
            return False
        for lease in leases:
            self._received.add(lease)
        return True

    def use(self, leases: Sequence[int]) -> None:
        """Count leases as used: their gradient is in the weights, or their samples gave no gradient.

        Args:
            leases: numbers of the leases.
        """
        for lease in leases if self.is_leased else ():
            if lease in self._used:
                self._counts.repeated += 1
            else:
                self._used.add(lease)
                self._counts.used += 1

    def done(self, leases: Sequence[int]) -> None:
        """Mark leases as complete.

        Args:
            leases: numbers of the leases.
        """
        for lease in leases:
            self.leases.done(lease)

    def take_back(self, leases: Sequence[int]) -> None:
        """Make leases available again; the server will grant them to the next workers that request a lease.

        Args:
            leases: numbers of the leases.
        """
        for lease in leases:
            self.leases.take_back(lease)
