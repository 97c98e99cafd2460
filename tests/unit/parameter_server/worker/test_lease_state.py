"""Metric sums of a lease are sent with its gradient; sums that hooks log between two pushes are separate."""

from __future__ import annotations

from typing import Any

from fabricx.parameter_server.worker.lease_state import LeaseState


def logged(value: float) -> dict[str, Any]:
    return {"loss": [["sum"], value, 1]}


class Log:
    """Values logged since the latest read."""

    def __init__(self) -> None:
        self.value = 0.0

    def take(self) -> dict[str, Any]:
        value, self.value = self.value, 0.0
        return logged(value) if value else {}


def test_values_of_a_lease_are_separate_from_values_of_earlier_hooks() -> None:
    leases, log = LeaseState(), Log()
    log.value = 2.0  # by a hook after the newest push
    leases.log_with(log.take, new_update=True)
    log.value = 3.0  # by the step
    assert leases.logged_sums() == (logged(3.0), logged(2.0))
    assert leases.logged_sums() == ({}, {})


def test_values_logged_between_leases_belong_to_the_round() -> None:
    leases, log = LeaseState(), Log()
    leases.log_with(log.take, new_update=True)
    log.value = 2.0
    leases.log_with(log.take, new_update=False)
    assert leases.logged_sums() == (logged(2.0), {})
