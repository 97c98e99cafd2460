"""Sums of logged values that travel with gradients and count exactly when these count."""

from __future__ import annotations

from typing import Any, final

from fabricx.distributed.metric_sums import merge_sums


@final
class Logged:
    """What workers have logged for the leases that are in the weights, of the newest section and the one before.

    It is a part of the server's state, so that it outlives workers, and, in the journal, the server.
    """

    def __init__(self) -> None:
        self._sections: dict[int, dict[str, Any]] = {}
        self._newest = -1
        self._used: dict[int, bool] = {}  # whether the newest gradient of a worker was

    def open(self, section: int) -> None:
        """Begin a section."""
        kept = {number: sums for number, sums in self._sections.items() if number >= section - 1}
        self._newest, self._sections = section, {**kept, section: {}}
        self._used.clear()

    def add(self, worker: int, logged: tuple[dict[str, Any], dict[str, Any]], *, used: bool) -> None:
        """Add what has come with a gradient.

        Args:
            worker: that has sent it.
            logged: sums of its leases, and what hooks have logged after the worker's gradient before it.
            used: whether the gradient is.
        """
        own, after_the_one_before = logged
        sums = self._sections.get(self._newest, {})
        if self._used.get(worker, True):
            sums = merge_sums(sums, after_the_one_before)
        if used:
            sums = merge_sums(sums, own)
        self._sections[self._newest] = sums
        self._used[worker] = used

    def of(self, section: int) -> dict[str, Any]:
        """Return the sums of a section."""
        return self._sections.get(section, {})
