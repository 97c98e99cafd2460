"""The lease that a worker trains, and metric sums that are sent with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fabricx.distributed.statistics.metric_sums import merge_sums
from fabricx.parameter_server.wire.messages import LeaseReply


class LeaseState:
    """State of a worker that trains leases of the data.

    Attributes:
        lease: lease that is being trained.
        section: number of the newest section.
        within_section: the section has begun, and this worker has not reached its end.
        planned: number of workers at the start of the run.
        scheduled: number of updates that step schedulers have followed.
        workers: worker numbers on the servers, by rank.
        dropped: the newest gradient was late, and its data will be leased again.
        keeps_state: batches change buffers or metric objects of the module on this worker.
    """

    def __init__(self) -> None:
        self.lease: LeaseReply | None = None
        self.section = -1
        self.within_section = False
        self.planned = self.scheduled = 0
        self.workers: tuple[int, ...] = ()
        self.dropped = False
        self.keeps_state = False
        self._take_logged: Callable[[], dict[str, Any]] = dict
        self._logged_after: dict[str, Any] = {}  # metric sums that hooks have logged since the newest push
        self._samples: list[tuple[int, int, int]] = []  # trained since the newest push

    def log_with(self, take_logged: Callable[[], dict[str, Any]], *, new_update: bool) -> None:
        """Use a source of metric sums for the present lease.

        Args:
            take_logged: returns the metric sums since its previous call.
            new_update: earlier sums do not belong to the lease's update: hooks have logged them after the newest push.
        """
        self._take_logged = take_logged
        if new_update:
            self._logged_after = merge_sums(self._logged_after, take_logged())

    def logged_sums(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the metric sums for the next push; see `Push`."""
        after, self._logged_after = self._logged_after, {}
        return self._take_logged(), after

    def trains(self, epoch: int, begin: int, end: int) -> None:
        """Count the samples of a batch, which are sent with its gradient.

        Args:
            epoch: number of the epoch.
            begin, end: range of the samples in its order.
        """
        self._samples.append((epoch, begin, end))

    def take_samples(self) -> list[tuple[int, int, int]]:
        """Return the samples for the next push; see `Push`."""
        samples, self._samples = self._samples, []
        return samples

    def end(self) -> None:
        """Release the source of metric sums."""
        self._take_logged, self._logged_after, self._samples = dict, {}, []
