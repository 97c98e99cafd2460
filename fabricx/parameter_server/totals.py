"""Totals of a run's exchange with servers, for loggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

from fabricx.parameter_server.wire.messages import Counts


@final
class Totals:
    """Totals of all workers and servers since their begin.

    Args:
        workers: (bytes sent, bytes received, seconds waited) of each worker.
        servers: counts of each server.
    """

    def __init__(self, workers: Sequence[tuple[int, int, float]], servers: Sequence[Counts]) -> None:
        sent, received, waited = (sum(column) for column in zip(*workers, strict=True))
        self.totals = {"sent_mib": sent / 2**20, "received_mib": received / 2**20, "waited_s": waited}
        self.totals["dropped"] = float(sum(server.dropped for server in servers))
        self.messages, self.queued = (
            sum(server.messages for server in servers),
            sum(server.queued for server in servers),
        )
        self.staleness = Counter[int]()
        for server in servers:
            self.staleness.update(server.staleness)
        self.lead = max((server.lead for server in servers), default=0)

    def since(self, before: Totals | None) -> dict[str, float]:
        """Return the differences to earlier totals, by metric name.

        Args:
            before: earlier totals; None for zero.
        """
        earlier = before.totals if before is not None else dict.fromkeys(self.totals, 0.0)
        # A worker or server may have died since, so that a total is smaller than before.
        metrics = {f"exchange/{name}": max(0.0, value - earlier[name]) for name, value in self.totals.items()}
        staleness = self.staleness - before.staleness if before is not None else self.staleness
        if staleness:
            metrics["exchange/staleness_mean"] = sum(k * n for k, n in staleness.items()) / staleness.total()
            metrics["exchange/staleness_max"] = float(max(staleness))
        messages, queued = self.messages, self.queued
        if before is not None:
            messages, queued = messages - before.messages, queued - before.queued
        if messages > 0:
            metrics["exchange/queue_mean"] = queued / messages
        return {**metrics, "exchange/clock_lead": float(self.lead)}
