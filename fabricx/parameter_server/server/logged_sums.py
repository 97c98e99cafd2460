"""Metric sums that are sent with gradients, and count if the gradients are used."""

from __future__ import annotations

from typing import Any, final

from fabricx.distributed.statistics.metric_sums import merge_sums


@final
class LoggedSums:
    """Metric sums of the leases that are in the weights, for the newest section and its predecessor.

    They are a part of the server's state, so they survive the death of workers and, in the journal, of the server.
    """

    def __init__(self) -> None:
        self._sections: dict[int, dict[str, Any]] = {}
        self._newest = -1
        self._used: dict[int, bool] = {}  # worker -> its newest gradient was used

    def open(self, section: int) -> None:
        """Begin a section.

        Args:
            section: number of the section.
        """
        kept = {number: sums for number, sums in self._sections.items() if number >= section - 1}
        self._newest, self._sections = section, {**kept, section: {}}
        self._used.clear()

    def add(self, worker: int, logged: tuple[dict[str, Any], dict[str, Any]], *, used: bool) -> None:
        """Add the sums of a push.

        Args:
            worker: number of the sender.
            logged: sums of the push's leases, and sums that hooks have logged after the worker's previous push.
            used: the gradient is used.
        """
        of_leases, after_previous = logged
        sums = self._sections.get(self._newest, {})
        if self._used.get(worker, True):
            sums = merge_sums(sums, after_previous)
        if used:
            sums = merge_sums(sums, of_leases)
        self._sections[self._newest] = sums
        self._used[worker] = used

    def of(self, section: int) -> dict[str, Any]:
        """Return the sums of a section.

        Args:
            section: the newest section or its predecessor.
        """
        return self._sections.get(section, {})
