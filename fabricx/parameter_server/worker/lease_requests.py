"""A worker's requests for leases of the data."""

from __future__ import annotations

import time
from typing import Any, final

from fabricx.parameter_server.wire.messages import (
    CloseSection,
    LeaseReply,
    LeaveSection,
    OpenSection,
    ReadState,
    Reply,
    RequestLease,
    TakeTurn,
)
from fabricx.parameter_server.worker.exchange import ExchangeStatistics
from fabricx.parameter_server.worker.servers import Servers


@final
class LeaseRequests:
    """Requests for leases; the first server grants them.

    Args:
        servers: this worker's servers.
        statistics: this worker's statistics, updated in place.
    """

    def __init__(self, servers: Servers, statistics: ExchangeStatistics) -> None:
        self._servers, self._statistics = servers, statistics

    def open(
        self, section: int, leases: int, version: int, workers: tuple[int, ...], data: tuple[int, int, int] | None
    ) -> None:  # fmt: skip
        """Begin a section of the data; every worker calls it.

        Args:
            section: number of the section.
            leases: number of leases.
            version: present version of the weights.
            workers: numbers of the workers.
            data: see `OpenSection`.
        """
        for number in range(len(self._servers.shards)):
            self._servers.notify(number, OpenSection(section, leases, version, workers, data))

    def ask(self, section: int, *, wait: bool) -> LeaseReply:
        """Request this worker's next lease.

        Args:
            section: number of the section.
            wait: wait for a lease or the end of the section; this worker holds no lease.
        """
        granted: LeaseReply = self._request(RequestLease(section, wait))
        return granted

    def take_turn(self) -> Reply:
        """Wait until the next update is reserved for this worker's next push.

        Returns:
            The number of the update as its version; its content is False if the gradient would not be used.
        """
        reply: Reply = self._request(TakeTurn())
        return reply

    def close_section(self, section: int) -> None:
        """End the distribution of leases of a section.

        Args:
            section: number of the section.
        """
        self._servers.notify(0, CloseSection(section))

    def leave_section(self, section: int) -> None:
        """Request no more leases of a section, whose other workers go on.

        Args:
            section: number of the section.
        """
        self._servers.notify(0, LeaveSection(section))

    def logged(self, section: int) -> dict[str, Any]:
        """Return the metric sums of the used gradients of a section.

        Args:
            section: number of the section.
        """
        sums: dict[str, Any] = self._servers.request(0, ReadState("logged", section)).content
        return sums

    def _request(self, message: RequestLease | TakeTurn) -> Any:
        begun = time.perf_counter()
        reply = self._servers.request(0, message)
        self._statistics.waited_s += time.perf_counter() - begun
        return reply
